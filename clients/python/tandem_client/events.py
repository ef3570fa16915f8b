"""Events and results of a completion as plain values, without protobuf, and their decoding."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.errors import InternalError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import stream_pb2
from tandem_client.params import ResolvedParams, params_from_proto


class FinishReason(enum.IntEnum):
    """Finish reason of an output; see tandem.common.v1.FinishReason."""

    UNSPECIFIED = 0
    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_LIMIT = 5
    DEADLINE = 6
    CANCELLED = 7
    SUPERSEDED = 8

    @classmethod
    def _missing_(cls, value: object) -> FinishReason:  # noqa: ARG003  # enum's signature
        # A newer server may send other reasons; the contract says to read them as UNSPECIFIED.
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """
    Acceptance of the request. `prompt_tokens` are left after the oldest `truncated_prompt_tokens`
    were dropped; output continues after the `resumed_tokens` that the request carried. `model` is
    the name of the model that serves the request.
    """

    request_id: str
    params: ResolvedParams
    prompt_tokens: int
    model_revision: str
    truncated_prompt_tokens: int
    resumed_tokens: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """
    The request waits behind `position` others. `blocked_by`, here and in the next two classes, is a
    sentence that says why the server computes nothing at present; it is empty while it computes.
    """

    position: int
    blocked_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The request was admitted; `cached_tokens` leading prompt tokens hit the prefix cache."""

    cached_tokens: int
    blocked_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Prefill has computed `done_tokens` of the prompt."""

    done_tokens: int
    blocked_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """
    Natural log probability of a token by the model itself; `top` has (id, logprob) of the likeliest
    tokens, best first. `text` and `top_texts` are texts of single tokens, for display; they are
    empty if the server sends none. `token_bytes` and `top_token_bytes` are what the tokens add, or
    would have added, to the UTF-8 of the output, where `token_bytes` was asked for; `requested` are
    the log probabilities of `logprob_token_ids`, in their order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    text: str = ""
    top_texts: tuple[str, ...] = ()
    token_bytes: bytes = b""
    top_token_bytes: tuple[bytes, ...] = ()
    requested: tuple[float, ...] = ()
    rank: int = 0
    """Of a prompt token: its place among all ids, from 1; 0 for outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """
    Tokens of the prompt from `first_position` on, with their log probabilities; None for the
    prompt's first token, which nothing predicts. A stream that breaks before its first output tells
    them again from position 0 on.
    """

    first_position: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """
    New output: ids and exactly their text, never cumulative, and one entry of `logprobs` per id if
    they were asked for.
    """

    choice: int
    first_token_offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A choice ended; `matched` is the stop string or the token id that ended it."""

    choice: int
    reason: FinishReason
    matched: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of the whole request; the prompt counts once, with choice 0's cache hits."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """
    Seconds from the arrival at the server. For a resumed stream, this client measures `total_s` and
    `time_to_first_token_s`, and the other fields are those of the last call.
    """

    queue_s: float
    time_to_first_token_s: float
    total_s: float
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The last event of a stream that ended well."""

    usage: Usage
    timings: Timings


Event = Started | PromptLogprobs | Queued | Scheduled | Prefilled | Delta | Finished | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """
    One whole output; `matched` is the stop string or the token id that ended it. `logprobs` has one
    entry per id if they were asked for.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    matched: str | int | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer: `choices` in order, at least one; the properties are those of choice 0."""

    request_id: str
    choices: tuple[Choice, ...]
    params: ResolvedParams
    prompt_tokens: int
    truncated_prompt_tokens: int
    model_revision: str
    usage: Usage
    timings: Timings
    model: str = ""
    prompt: PromptLogprobs | None = None
    """The whole prompt, where `prompt_logprobs` was asked for."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Log probabilities of the prompt's tokens, None for the first; empty if not asked for."""
        return () if self.prompt is None else self.prompt.logprobs

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of choice 0."""
        return self.choices[0].logprobs

    @property
    def reason(self) -> FinishReason:
        """Finish reason of choice 0."""
        return self.choices[0].reason

    @property
    def matched(self) -> str | int | None:
        """Stop string or token id that ended choice 0, if one did."""
        return self.choices[0].matched


def event_from_proto(  # noqa: PLR0911  # one return for each kind
    response: inference.GenerateResponse,
) -> Event | None:
    """Decode one stream message; return None for a kind that this version does not know."""
    match response.WhichOneof("event"):
        case "delta":
            return delta_from_proto(response.delta)
        case "prompt_logprobs":
            return _prompt_logprobs(response.prompt_logprobs)
        case "progress":
            return _progress(response.progress)
        case "started":
            return _started(response.started)
        case "finished":
            return Finished(
                choice=response.finished.choice,
                reason=FinishReason(response.finished.reason),
                matched=_matched(response.finished),
            )
        case "done":
            return _done(response.done)
    return None


def delta_from_proto(delta: stream_pb2.Delta) -> Delta:
    """Decode new output."""
    return Delta(
        choice=delta.choice,
        first_token_offset=delta.first_token_offset,
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        logprobs=_logprobs(delta),
    )


def completion_from_proto(response: inference.CompleteResponse) -> Completion:
    """
    Decode the answer of Complete.

    Raises:
        InternalError: The server sent no completion.
    """
    if not response.completions:
        raise InternalError("the server answered Complete without a completion")
    choices = tuple(
        Choice(
            choice=one.choice,
            text=one.text,
            token_ids=tuple(one.token_ids),
            reason=FinishReason(one.reason),
            matched=_matched(one),
            logprobs=_logprobs(one),
        )
        for one in response.completions
    )
    prompt = None
    if response.HasField("prompt_logprobs"):
        prompt = _prompt_logprobs(response.prompt_logprobs)
    return completion_of(_started(response.started), choices, _done(response.done), prompt)


def completion_of(
    started: Started,
    choices: tuple[Choice, ...],
    done: Done,
    prompt: PromptLogprobs | None = None,
) -> Completion:
    """Join the parts of a stream into a completion."""
    return Completion(
        request_id=started.request_id,
        choices=choices,
        params=started.params,
        prompt_tokens=started.prompt_tokens,
        truncated_prompt_tokens=started.truncated_prompt_tokens,
        model_revision=started.model_revision,
        usage=done.usage,
        timings=done.timings,
        model=started.model,
        prompt=prompt,
    )


def _started(message: stream_pb2.Started) -> Started:
    response = message.response
    return Started(
        request_id=message.request_id,
        params=params_from_proto(
            message.sampling,
            message.stopping,
            n=message.n,
            priority=message.priority,
            logprobs=response.logprobs if response.HasField("logprobs") else None,
        ),
        prompt_tokens=message.prompt_tokens,
        model_revision=message.model_revision,
        truncated_prompt_tokens=message.truncated_prompt_tokens,
        resumed_tokens=message.resumed_tokens,
        model=message.model,
    )


def _progress(message: stream_pb2.Progress) -> Queued | Scheduled | Prefilled | None:
    why = message.blocked_by
    match message.WhichOneof("state"):
        case "queued":
            return Queued(position=message.queued.position, blocked_by=why)
        case "scheduled":
            return Scheduled(cached_tokens=message.scheduled.cached_tokens, blocked_by=why)
        case "prefilled":
            return Prefilled(done_tokens=message.prefilled.done_tokens, blocked_by=why)
    return None


def _prompt_logprobs(message: stream_pb2.PromptLogprobs) -> PromptLogprobs:
    told: list[TokenLogprobs | None] = list(_logprobs(message))
    if told and message.first_position == 0:
        told[0] = None
    return PromptLogprobs(
        first_position=message.first_position,
        token_ids=tuple(message.token_ids),
        texts=tuple(one.text for one in message.logprobs),
        logprobs=tuple(told),
    )


def _logprobs(
    message: stream_pb2.Delta | inference.Completion | stream_pb2.PromptLogprobs,
) -> tuple[TokenLogprobs, ...]:
    if not message.logprobs:
        return ()
    return tuple(
        TokenLogprobs(
            logprob=one.logprob,
            top=tuple(zip(one.top_token_ids, one.top_logprobs, strict=True)),
            text=one.text,
            top_texts=tuple(one.top_texts),
            token_bytes=one.token_bytes,
            top_token_bytes=tuple(one.top_token_bytes),
            requested=tuple(one.requested_logprobs),
            rank=one.rank,
        )
        for one in message.logprobs
    )


def _matched(message: stream_pb2.Finished | inference.Completion) -> str | int | None:
    match message.WhichOneof("matched"):
        case "stop_string":
            return message.stop_string
        case "token_id":
            return message.token_id
    return None


def _done(message: stream_pb2.Done) -> Done:
    return Done(
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            output_tokens=message.usage.output_tokens,
            cached_tokens=message.usage.cached_tokens,
        ),
        timings=Timings(
            queue_s=message.timings.queue_s,
            time_to_first_token_s=message.timings.time_to_first_token_s,
            total_s=message.timings.total_s,
            preemptions=message.timings.preemptions,
        ),
    )
