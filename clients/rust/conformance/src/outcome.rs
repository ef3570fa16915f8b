//! What a caller got, in the form of a result.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tandem_client::inference::v1::{
    batch_event, completion, finished, generate_response::Event, *,
};
use tandem_client::{Error, ErrorReason, FinishReason};

#[derive(Clone, Default)]
pub struct Outcome {
    pub num_deltas: usize,
    pub error: Option<Error>,
    choices: BTreeMap<u32, Value>,
    started: Option<Started>,
    output_tokens: Option<u32>,
}

impl Outcome {
    /// Take an event, and return its name.
    pub fn take(&mut self, event: Event) -> &'static str {
        match event {
            Event::Started(started) => {
                self.started = Some(started);
                "started"
            }
            Event::Progress(_) => "progress",
            Event::PromptLogprobs(_) => "prompt_logprobs",
            Event::Delta(delta) => {
                self.num_deltas += 1;
                self.add(delta.choice, &delta.token_ids, &delta.text);
                "delta"
            }
            Event::Finished(end) => {
                self.finish(end);
                "finished"
            }
            Event::Done(done) => {
                self.output_tokens = Some(done.usage.unwrap_or_default().output_tokens);
                "done"
            }
        }
    }

    /// Take a whole answer.
    pub fn take_whole(&mut self, answer: CompleteResponse) {
        self.started = answer.started;
        for one in answer.completions {
            self.add(one.choice, &one.token_ids, &one.text);
            let matched = one.matched.map(|matched| match matched {
                completion::Matched::StopString(text) => finished::Matched::StopString(text),
                completion::Matched::TokenId(id) => finished::Matched::TokenId(id),
            });
            self.finish(Finished { choice: one.choice, reason: one.reason, matched });
        }
        if let Some(done) = answer.done {
            self.take(Event::Done(done));
        }
    }

    pub fn json(&self) -> Value {
        let mut result = json!({"choices": self.choices.values().collect::<Vec<_>>()});
        if let Some(tokens) = self.output_tokens {
            result["output_tokens"] = json!(tokens);
        }
        if let Some(started) = &self.started {
            let seed = started.sampling.as_ref().and_then(|sampling| sampling.seed);
            result["started"] = json!({
                "request_id": started.request_id,
                "prompt_tokens": started.prompt_tokens,
                "model_revision": started.model_revision,
                "seed": seed.map(|seed| seed.to_string()),
            });
        }
        if let Some(error) = &self.error {
            result["error"] = error_json(error);
        }
        result
    }

    fn add(&mut self, number: u32, ids: &[i32], text: &str) {
        let choice = self.choice(number);
        choice["token_ids"].as_array_mut().unwrap().extend(ids.iter().map(|id| json!(id)));
        choice["text"] = json!(choice["text"].as_str().unwrap().to_owned() + text);
    }

    fn finish(&mut self, end: Finished) {
        let choice = self.choice(end.choice);
        let reason = FinishReason::try_from(end.reason).unwrap_or_default().as_str_name();
        choice["reason"] = json!(reason.trim_start_matches("FINISH_REASON_"));
        match end.matched {
            Some(finished::Matched::StopString(text)) => choice["stop_string"] = json!(text),
            Some(finished::Matched::TokenId(id)) => choice["token_id"] = json!(id),
            None => {}
        }
    }

    fn choice(&mut self, number: u32) -> &mut Value {
        let empty = json!({"choice": number, "token_ids": [], "text": "", "reason": null});
        self.choices.entry(number).or_insert(empty)
    }
}

/// Return the event of an item as the event of a stream of its own.
pub fn event_of_item(event: batch_event::Event) -> Event {
    match event {
        batch_event::Event::Started(started) => Event::Started(started),
        batch_event::Event::Progress(progress) => Event::Progress(progress),
        batch_event::Event::PromptLogprobs(part) => Event::PromptLogprobs(part),
        batch_event::Event::Delta(delta) => Event::Delta(delta),
        batch_event::Event::Finished(end) => Event::Finished(end),
        batch_event::Event::Done(done) => Event::Done(done),
        batch_event::Event::Error(_) => unreachable!("the caller takes errors"),
    }
}

pub fn error_json(error: &Error) -> Value {
    let info = error.info();
    json!({
        "code": code_name(error),
        "reason": info.as_ref().map(|info| &info.reason),
        "known": error.reason() != ErrorReason::Unspecified,
        "message": error.message(),
        "field": error.field(),
        "metadata": info.as_ref().map(|info| &info.metadata).cloned().unwrap_or_default(),
        "retry_after_ms": error.retry_after().map(|wait| wait.as_millis() as u64),
        "request_id": error.request_id(),
    })
}

/// Return the name of a code as gRPC writes it: `INVALID_ARGUMENT` for `InvalidArgument`.
fn code_name(error: &Error) -> String {
    let mut name = String::new();
    for letter in format!("{:?}", error.code()).chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}
