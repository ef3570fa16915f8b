"""
What frontends and core say to each other: typed msgpack structs, token columns as little-endian
bytes.

A frontend numbers the choices of its requests with `stream_id` (uint32, never reused while live),
those of one request consecutively; the core answers with the same numbers. Times are
CLOCK_MONOTONIC seconds, comparable between processes of one host.
"""

from __future__ import annotations

import msgspec


class Hello(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """First message of a frontend, sent once its ports listen; port 0 is resolved here."""

    frontend_index: int
    pid: int
    address: str = ""
    """host:port of the public service."""
    admin_address: str | None = None
    metrics_address: str | None = None


class Submit(msgspec.Struct, array_like=True, tag=2, frozen=True, kw_only=True):
    """A validated, tokenized request; answered by `Accepted` or `Refused`."""

    stream_id: int
    request_id: str
    prompt: bytes
    """int32 token ids."""
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    arrival_s: float
    deadline_s: float | None
    model_revision: str = ""
    """`Model.revision` it was tokenized for; another one by now refuses it. Empty: any."""
    fills_context: bool = False
    """See scheduler_svc.core.request.request.NewRequest."""
    num_choices: int = 1
    """Choice i has the stream number `stream_id` + i."""
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    block_digests: bytes = b""
    """See scheduler_svc.core.request.block_hashes; empty where the prompt was not hashed."""
    digest_block_size: int = 0
    """Block size they were made for; digests made for another one are of no use."""
    prior_outputs: tuple[bytes, ...] = ()
    """int32 output ids that each choice has already; empty where none has any."""
    finished_choices: tuple[int, ...] = ()
    """Choices that nothing is to be computed for; no event tells of them."""
    idempotency_key: str = ""
    """Empty: none."""
    fingerprint: bytes = b""
    """Of the prompt and all parameters but the seed; requests with one key must agree in it."""
    is_seed_given: bool = False
    """The client sent `seed`."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Likeliest ids to tell with each token; None for no log probabilities at all."""


class EndStream(msgspec.Struct, array_like=True, tag=3, frozen=True, kw_only=True):
    """
    End a choice of an own request: client gone (`CANCELLED`) or stop string found (`STOP_STRING`,
    counted to a token). Other choices of the request go on.
    """

    stream_id: int
    reason: int
    """A FinishReason number."""
    num_output_tokens: int | None


class Query(msgspec.Struct, array_like=True, tag=4, frozen=True, kw_only=True):
    """
    A question answered by one `Reply` with the same `query_id`; `argument` is JSON, as is the
    answer.
    """

    query_id: int
    kind: str
    """See scheduler_svc.ipc.snapshot."""
    argument: bytes


class Model(msgspec.Struct, array_like=True, tag=10, frozen=True, kw_only=True):
    """
    What is served; sent after Hello once known, and again when an executor with another model is
    attached.
    """

    name: str
    revision: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float
    default_top_k: int
    default_top_p: float
    tokenizer_dir: str
    """Directory with tokenizer.json and its companions, readable by frontends."""
    block_size: int = 0
    """Tokens per block for the digests of prompts; 0 where prompts need none."""
    truncates: bool = False
    """Too long requests are made to fit instead of refused."""
    default_repetition_penalty: float = 1.0
    default_min_p: float = 0.0
    kv_tokens: int | None = None
    """Tokens that the KV memory holds; None for no less than `max_model_len`."""


class Availability(msgspec.Struct, array_like=True, tag=11, frozen=True, kw_only=True):
    """Whether new requests can be taken; sent after Hello and at every change."""

    executor_attached: bool
    ready: bool
    draining: bool
    progressing: bool = True
    """False while a step in flight is older than it should be, or heartbeats are missing."""
    refusal: str = ""
    """Why an executor that answers is not used, where only an operator can change that."""
    frontends_alive: bool = True
    """False while a frontend was not heard for as long as liveness allows."""
    blocked_by: str = ""
    """Why nothing is computed, in a sentence for people; empty while it is."""


class Accepted(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """
    All choices of the request are in the system; their events follow in `Update`s, by the stream
    number of each.
    """

    stream_id: int
    """Of choice 0."""
    num_truncated_tokens: int = 0
    """Oldest prompt tokens that the core dropped."""
    max_tokens: int | None = None
    """What was asked for, where the core did not lower it."""


class Refused(msgspec.Struct, array_like=True, tag=13, frozen=True, kw_only=True):
    """The request was refused and nothing of it is kept."""

    stream_id: int
    reason: str
    """A name of tandem.common.v1.ErrorReason."""
    message: str
    field: str | None
    retry_after_s: float | None
    metadata: dict[str, str]


class StreamEnd(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One request ended well; see scheduler_svc.core.request.events.Ended."""

    stream_id: int
    reason: int
    matched_token: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float
    num_preemptions: int


class StreamProgress(msgspec.Struct, array_like=True, frozen=True):
    """One request changed place; `kind` is a ProgressKind number."""

    stream_id: int
    kind: int
    value: int


class StreamLogprobs(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Log probabilities of Q tokens; see tandem.link.logprobs for the last four columns."""

    stream: bytes
    """uint32 ``[Q]``: whose token."""
    offset: bytes
    """int32 ``[Q]``: its output offset."""
    chosen: bytes
    top_start: bytes
    top_token: bytes
    top: bytes


class Update(msgspec.Struct, array_like=True, tag=14, frozen=True, kw_only=True):
    """
    What is new, one or a few per step and frontend: tokens of some streams, then the rest, which
    comes after the tokens. See scheduler_svc.ipc.token_run. Offsets let a frontend check that
    nothing was lost when steps were merged.
    """

    token_stream: bytes = b""
    """uint32, shape ``[N]``."""
    token_offset: bytes = b""
    """int32, shape ``[N]``: output offset of each stream's first token here."""
    token: bytes = b""
    """int32, shape ``[rows, N]``: a stream's tokens in order; one row unless steps were merged."""
    ended: tuple[StreamEnd, ...] = ()
    failed: tuple[Refused, ...] = ()
    progress: tuple[StreamProgress, ...] = ()
    logprobs: tuple[StreamLogprobs, ...] = ()
    """Of streams that asked, in order: before or after their tokens, but before their ends."""


class Reply(msgspec.Struct, array_like=True, tag=15, frozen=True, kw_only=True):
    """Answer to a `Query`; `error` is set instead of `result` when it failed."""

    query_id: int
    result: bytes
    error: Refused | None


FrontendMessage = Hello | Submit | EndStream | Query
CoreMessage = Model | Availability | Accepted | Refused | Update | Reply

encode = msgspec.msgpack.Encoder().encode
_frontend_decoder: msgspec.msgpack.Decoder[FrontendMessage] = msgspec.msgpack.Decoder(
    FrontendMessage
)
_core_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
decode_from_frontend = _frontend_decoder.decode
decode_from_core = _core_decoder.decode
