//! One Generate over all the calls that it takes.
use crate::inference::v1::{generate_response::Event, *};
use crate::{Client, Error, Result, retry::Failures};
use std::{collections::BTreeMap, time::Duration};
use tokio::{sync::mpsc::Sender, time::Instant, time::sleep};
use tonic::Code;

/// What the caller of a Generate got so far.
#[derive(Default)]
struct State {
    started: Option<Started>,
    received: BTreeMap<u32, PriorOutput>,
    has_output: bool,
    is_done: bool,
    failures: Failures,
}
/// Send the events of a request, by as many calls as it takes.
pub(crate) async fn generate(
    client: &Client, mut request: GenerateRequest, sender: &Sender<Result<GenerateResponse>>,
) -> Result<()> {
    let has_ids = !request.response.as_ref().is_some_and(|one| one.omit_token_ids());
    let limit = request.time_limit_s.and_then(|one| Duration::try_from_secs_f64(one).ok());
    let soft_end = limit.and_then(|limit| Instant::now().checked_add(limit));
    let mut state = State { failures: client.failures.clone(), ..State::default() };
    let held = request.resume.iter().flat_map(|one| &one.choices);
    state.received = held.map(|one| (one.choice, one.clone())).collect();
    loop {
        let call = async {
            let attempt = client.request(request.clone())?;
            let mut responses = client.stub.clone().generate(attempt).await?.into_inner();
            while let Some(response) = responses.message().await? {
                if state.accept(response.event.as_ref(), has_ids)? {
                    let _ = sender.send(Ok(response)).await;
                }
            }
            Err::<(), _>(broken_promise("the server ended the stream before `done`"))
        };
        let Some(error) = call.await.err().filter(|_| !state.is_done) else { return Ok(()) };
        if !has_ids && state.has_output {
            return Err(error); // nothing tells where it broke
        }
        let wait = state.failures.wait(&client.retry, error, state.started.is_some())?;
        if let Some(started) = state.started.clone() {
            request.resume = Some(Resume { choices: state.received.values().cloned().collect() });
            (request.sampling, request.stopping) = (started.sampling, started.stopping);
            request.request_id = Some(started.request_id);
        }
        let left = soft_end.map(|end| end.saturating_duration_since(Instant::now() + wait));
        request.time_limit_s = left.map(|left| left.as_secs_f64().max(0.001));
        sleep(wait).await;
    }
}

impl State {
    /// Take note of an event, and return whether it is news for the caller.
    fn accept(&mut self, event: Option<&Event>, has_ids: bool) -> Result<bool> {
        match event {
            Some(Event::Started(now)) => {
                self.failures.broken_since = None;
                let is_first = self.started.is_none();
                let first = self.started.get_or_insert_with(|| now.clone());
                if now.model_revision != first.model_revision {
                    let code = Code::FailedPrecondition;
                    return Err(Error::found(code, "MODEL_CHANGED", "another model is served now"));
                }
                let ids = self.received.values().flat_map(|one| &one.token_ids);
                if now.resumed_tokens as usize != ids.count() {
                    return Err(broken_promise("the server does not go on where the stream broke"));
                }
                return Ok(is_first);
            }
            Some(Event::Delta(delta)) => {
                let ids = &mut self.output(delta.choice).token_ids;
                if has_ids && delta.first_token_offset as usize != ids.len() {
                    return Err(broken_promise("the server left tokens out, or repeats them"));
                }
                ids.extend(&delta.token_ids);
                (self.failures.in_a_row, self.failures.breaks_in_vain) = (0, 0);
            }
            Some(Event::Finished(end)) => self.output(end.choice).finished = true,
            Some(Event::Done(_)) => self.is_done = true,
            Some(Event::Progress(_) | Event::PromptLogprobs(_)) => {}
            None => return Ok(false), // of a newer server
        }
        Ok(true)
    }
    fn output(&mut self, choice: u32) -> &mut PriorOutput {
        self.has_output = true;
        self.received.entry(choice).or_insert(PriorOutput { choice, ..Default::default() })
    }
}

fn broken_promise(text: &str) -> Error {
    Error::found(Code::Internal, "INTERNAL", text)
}
