//! Plays a caller of the client, as clients/conformance/README.md says: commands come in as JSON
//! lines and are carried out at the same time; results go out as JSON lines.

mod command;
mod messages;
mod outcome;

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tandem_client::inference::v1::{batch_event, *};
use tandem_client::{Client, Error, StreamExt};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::UnboundedReceiverStream;

use command::Command;
use messages::Messages;
use outcome::{Outcome, error_json, event_of_item};

/// What all commands share.
#[derive(Default)]
struct Caller {
    messages: Messages,
    connections: Mutex<HashMap<String, Client>>,
    /// For each running command that may be cancelled, what makes its caller leave.
    running: Mutex<HashMap<String, oneshot::Sender<()>>>,
}

#[tokio::main]
async fn main() {
    let caller = Arc::new(Caller::default());
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await.expect("standard input is text") {
        let command: Command = serde_json::from_str(&line).expect("a line is a command");
        let (leave, left) = oneshot::channel();
        caller.running.lock().unwrap().insert(command.id.clone(), leave);
        let caller = caller.clone();
        tokio::spawn(async move {
            let result = caller.carry_out(&command, left).await;
            caller.running.lock().unwrap().remove(&command.id);
            print(json!({"id": command.id, "result": result}));
        });
    }
}

/// Print one line, whole and at once.
fn print(line: Value) {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("standard output is open");
}

impl Caller {
    async fn carry_out(&self, command: &Command, left: oneshot::Receiver<()>) -> Value {
        let result = match command.what.as_str() {
            "cancel" => {
                let id = command.command.as_deref().unwrap_or_default();
                self.running.lock().unwrap().remove(id); // dropping it makes the caller leave
                Ok(json!({}))
            }
            "generate" | "batch" => {
                let mut outcomes = vec![Outcome::default(); command.items.len().max(1)];
                let failure = tokio::select! {
                    ended = self.stream(command, &mut outcomes) => ended.err(),
                    _ = left => None,
                };
                let mut result = match command.what.as_str() {
                    "generate" => outcomes.remove(0).json(),
                    _ => json!({"items": outcomes.iter().map(Outcome::json).collect::<Value>()}),
                };
                if let Some(error) = failure {
                    result["error"] = error_json(&error);
                }
                Ok(result)
            }
            _ => tokio::select! {
                result = self.unary(command) => result,
                _ = left => Ok(json!({})),
            },
        };
        result.unwrap_or_else(|error| json!({"error": error_json(&error)}))
    }

    async fn stream(&self, command: &Command, outcomes: &mut [Outcome]) -> Result<(), Error> {
        let client = self.client(command)?;
        if command.what == "batch" {
            self.batch(command, client, outcomes).await
        } else {
            self.generate(command, client, &mut outcomes[0]).await
        }
    }

    async fn generate(
        &self, command: &Command, client: Client, outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let request = self.messages.read("GenerateRequest", &command.request)?;
        let mut events = client.generate(request);
        while let Some(response) = events.next().await {
            let Some(event) = response?.event else { continue };
            let name = outcome.take(event);
            if command.tell {
                print(json!({"id": command.id, "event": name}));
            }
            if name == "delta" && command.cancel_after_deltas == Some(outcome.num_deltas) {
                break;
            }
            self.pause(command, name, outcome.num_deltas).await;
        }
        Ok(())
    }

    async fn batch(
        &self, command: &Command, client: Client, outcomes: &mut [Outcome],
    ) -> Result<(), Error> {
        let mut add = Vec::new();
        for (item, request) in (0..).zip(&command.items) {
            let request = Some(self.messages.read("GenerateRequest", request)?);
            add.push(BatchItem { item, request });
        }
        let (sender, messages) = mpsc::unbounded_channel();
        let _ = sender.send(GenerateBatchRequest { add, ..Default::default() });
        let mut to_cancel = command.cancel_items.clone();
        let mut sender = Some(sender).filter(|_| !to_cancel.is_empty());
        let mut answers = client.generate_batch(UnboundedReceiverStream::new(messages)).await?;
        let mut num_deltas = 0;
        while let Some(answer) = answers.next().await {
            for BatchEvent { item, event } in answer?.events {
                let outcome = &mut outcomes[item as usize];
                let name = match event {
                    None => continue,
                    Some(batch_event::Event::Error(error)) => {
                        outcome.error = Some(Error::from_item(&error));
                        "error"
                    }
                    Some(event) => outcome.take(event_of_item(event)),
                };
                if command.tell && name != "error" {
                    print(json!({"id": command.id, "item": item, "event": name}));
                }
                num_deltas += usize::from(name == "delta");
                if matches!(name, "delta" | "done" | "error") && to_cancel.contains(&item) {
                    to_cancel.retain(|one| *one != item);
                    if let Some(sender) = &sender {
                        let cancel = vec![item];
                        let _ = sender.send(GenerateBatchRequest { cancel, ..Default::default() });
                    }
                }
                if to_cancel.is_empty() {
                    sender = None; // no more comes
                }
                self.pause(command, name, num_deltas).await;
            }
        }
        Ok(())
    }

    /// Read nothing for a while after the first delta, if the command says so.
    async fn pause(&self, command: &Command, name: &str, num_deltas: usize) {
        if name == "delta" && num_deltas == 1 {
            tokio::time::sleep(Duration::from_millis(command.pause_ms)).await;
        }
    }

    async fn unary(&self, command: &Command) -> Result<Value, Error> {
        let (client, messages, request) = (self.client(command)?, &self.messages, &command.request);
        Ok(match command.what.as_str() {
            "complete" => {
                let request = messages.read("GenerateRequest", request)?;
                let mut outcome = Outcome::default();
                match client.complete(request).await {
                    Ok(answer) => outcome.take_whole(answer),
                    Err(error) => outcome.error = Some(error),
                }
                outcome.json()
            }
            "abort" => {
                client.abort(messages.read("AbortRequest", request)?).await?;
                json!({})
            }
            "tokenize" => {
                let request = messages.read("TokenizeRequest", request)?;
                json!({"token_ids": client.tokenize(request).await?.token_ids})
            }
            "model" => {
                let request = messages.read("GetModelRequest", request)?;
                let model = client.get_model(request).await?.model.unwrap_or_default();
                json!({"model": messages.write("Model", &model)})
            }
            what => panic!("{what} is no command"),
        })
    }

    /// Return the client for a command, which commands of the same connection share.
    fn client(&self, command: &Command) -> Result<Client, Error> {
        let mut client = match &command.connection {
            None => command.connect()?,
            Some(name) => {
                let mut connections = self.connections.lock().unwrap();
                match connections.get(name) {
                    Some(client) => client.clone(),
                    None => {
                        let client = command.connect()?;
                        connections.insert(name.clone(), client.clone());
                        client
                    }
                }
            }
        };
        client.retry = command.policy();
        Ok(match command.deadline_ms {
            Some(limit) => client.with_deadline(Duration::from_millis(limit)),
            None => client,
        })
    }
}
