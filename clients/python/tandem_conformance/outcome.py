"""Outcomes of a caller's commands, as their `result`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.errors import ERROR_BY_REASON
from tandem_client import (
    Completion,
    Delta,
    Done,
    Event,
    Finished,
    Model,
    Prefilled,
    PromptLogprobs,
    Queued,
    Scheduled,
    Started,
    TandemError,
)

_KINDS: dict[type[Event], str] = {
    Started: "started",
    Queued: "progress",
    Scheduled: "progress",
    Prefilled: "progress",
    PromptLogprobs: "prompt_logprobs",
    Delta: "delta",
    Finished: "finished",
    Done: "done",
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Output of one request so far."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    output_tokens: int | None = None
    accepted: dict[str, Any] | None = None
    error: TandemError | None = None
    num_deltas: int = 0

    def take(self, event: Event) -> None:
        """Add an event of a stream."""
        match event:
            case Started():
                self._accept(event)
            case Delta():
                choice = self._choice(event.choice)
                choice["token_ids"] += event.token_ids
                choice["text"] += event.text
                self.num_deltas += 1
            case Finished():
                ending = {"reason": event.reason.name, **_matched(event.matched)}
                self._choice(event.choice).update(ending)
            case Done():
                self.output_tokens = event.usage.output_tokens

    def take_whole(self, completion: Completion) -> None:
        """Add all of a completion."""
        self._accept(completion)
        for one in completion.choices:
            self._choice(one.choice).update(
                token_ids=list(one.token_ids),
                text=one.text,
                reason=one.reason.name,
                **_matched(one.matched),
            )
        self.output_tokens = completion.usage.output_tokens

    def as_json(self) -> dict[str, Any]:
        """Return the result in the form of clients/conformance."""
        result: dict[str, Any] = {"choices": [one for _, one in sorted(self.choices.items())]}
        if self.output_tokens is not None:
            result["output_tokens"] = self.output_tokens
        if self.accepted is not None:
            result["started"] = self.accepted
        return result if self.error is None else {**result, **failed(self.error)}

    def _accept(self, one: Started | Completion) -> None:
        self.accepted = {
            "request_id": one.request_id,
            "prompt_tokens": one.prompt_tokens,
            "model_revision": one.model_revision,
            "seed": str(one.params.seed),
        }

    def _choice(self, number: int) -> dict[str, Any]:
        empty = {"choice": number, "token_ids": [], "text": "", "reason": None}
        return self.choices.setdefault(number, empty)


def failed(error: TandemError) -> dict[str, Any]:
    """Return the result of what failed without output."""
    metadata = dict(error.metadata)
    # An error without Tandem's details says in its metadata what the connection told.
    untyped = metadata.get("grpc_code")
    waits_s = error.retry_after_s
    told = {
        "code": untyped or error.code,
        "reason": None if untyped else error.reason,
        "known": not untyped and error.reason in ERROR_BY_REASON,
        "message": error.message,
        "field": error.field,
        "metadata": {} if untyped else metadata,
        "retry_after_ms": None if waits_s is None else round(waits_s * 1000),
        "request_id": error.request_id or None,
    }
    return {"error": told}


def model_as_json(model: Model) -> dict[str, Any]:
    """Return fields of a model under the names of the contract."""
    return {
        "name": model.name,
        "revision": model.revision,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
    }


def kind_of(event: Event) -> str:
    """Return the name of an event in the contract."""
    return _KINDS[type(event)]


def _matched(value: str | int | None) -> dict[str, str | int]:
    """Return the stop string or token id of an end under its name in the contract."""
    if value is None:
        return {}
    return {"stop_string" if isinstance(value, str) else "token_id": value}
