"""
Messages between frontends and core: typed msgpack structs, with token columns as little-endian
bytes.

A frontend numbers the choices of its requests with `stream_id` (uint32, never reused while live);
the choices of one request have consecutive numbers. The core answers with the same numbers. Times
are CLOCK_MONOTONIC seconds, comparable between processes of one host.
"""

from __future__ import annotations

import msgspec

from scheduler_svc.core.request.new_request import log_ids
from scheduler_svc.core.request.tenant import TenantLimits
from tandem.errors import ERROR_BY_REASON, InternalError, TandemError
from tandem.sampling_params import SamplingParams


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
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    arrival_s: float
    deadline_s: float | None
    model_revision: str = ""
    """`Model.revision` it was tokenized for; refused if the core now has another. Empty: any."""
    fills_context: bool = False
    """True where `max_tokens` is what the context had left; see `NewRequest.fills_context`."""
    num_choices: int = 1
    """Choice i has the stream number `stream_id` + i."""
    priority: int = 0
    tenant: str = ""
    tenant_limits: TenantLimits | None = None
    """Limits and weight of that tenant; None where it has none of its own."""
    queue_limit_s: float | None = None
    """See `NewRequest.queue_limit_s`."""
    give_up_s: float | None = None
    """Deadline of the gRPC call; see `NewRequest.give_up_s`."""
    cache_salt: bytes = b""
    block_digests: bytes = b""
    """Digests of the prompt's full blocks (`core.request.block_hashes`); empty: not hashed."""
    digest_block_size: int = 0
    """Block size of `block_digests`; digests for another block size than the core's are unused."""
    prior_outputs: tuple[bytes, ...] = ()
    """int32 output ids that each choice has already; empty where none has any."""
    finished_choices: tuple[int, ...] = ()
    """Choices that have ended already: none of their tokens are computed, no event is sent."""
    attempt_key: str = ""
    """Key by which the core recognizes a repeated request; empty for none."""
    fingerprint: bytes = b""
    """Hash of prompt and all parameters but the seed; requests with one key must agree in it."""
    is_seed_given: bool = False
    """True when the client sent `seed`."""
    trace_id: str = ""
    """Id of the trace that its call is part of, 32 hexadecimal digits; empty for none."""
    span_id: str = ""
    """Id of its span there, 16 digits, to which spans of steps link; empty if none is recorded."""

    @property
    def log_ids(self) -> dict[str, str]:
        """Ids for lines of the log about this request."""
        return log_ids(self.request_id, self.trace_id)


class EndStream(msgspec.Struct, array_like=True, tag=3, frozen=True, kw_only=True):
    """
    Order to end a choice of the frontend's own request: its client is gone (`CANCELLED`) or a stop
    string was found (`STOP_STRING`, counted to a token). Other choices of the request go on.
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
    """Kind of the question; see scheduler_svc.ipc.snapshot."""
    argument: bytes


class Model(msgspec.Struct, array_like=True, tag=10, frozen=True, kw_only=True):
    """
    The model that is served; sent after Hello once known, and again when an executor with another
    model is attached.
    """

    name: str
    revision: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    """Sampling params of a request that sets none; the seed in them has no meaning."""
    tokenizer_dir: str
    """Directory with tokenizer.json and its companions, readable by frontends."""
    block_size: int = 0
    """Tokens per block for the digests of prompts; 0 where prompts need none."""
    truncates: bool = False
    """True when requests that are too long are truncated instead of refused."""
    kv_tokens: int | None = None
    """Tokens that the KV memory holds; None for no less than `max_model_len`."""


class Availability(msgspec.Struct, array_like=True, tag=11, frozen=True, kw_only=True):
    """State of the service that decides about new requests; sent after Hello and at each change."""

    executor_attached: bool
    ready: bool
    draining: bool
    progressing: bool = True
    """False while a step in flight is older than it should be, or heartbeats are missing."""
    refusal: str = ""
    """Reason an executor that answers is not used, where only an operator can change that."""
    frontends_alive: bool = True
    """False while a frontend was not heard for as long as liveness allows."""
    blocked_by: str = ""
    """Reason no step is computed, as a sentence for users; empty while steps are computed."""


class Accepted(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """
    Notice that all choices of a request were accepted; their events follow in `Update`s, by the
    stream number of each.
    """

    stream_id: int
    """Stream number of choice 0."""
    num_truncated_tokens: int = 0
    """Oldest prompt tokens that the core dropped."""
    max_tokens: int | None = None
    """Most output tokens of each choice: the number asked for, unless the core lowered it."""


class Refused(msgspec.Struct, array_like=True, tag=13, frozen=True, kw_only=True):
    """Error of a request or question; of a refused request nothing is kept."""

    stream_id: int
    reason: str
    """A name of tandem.common.v1.ErrorReason."""
    message: str
    field: str | None
    retry_after_s: float | None
    metadata: dict[str, str]

    def as_error(self) -> TandemError:
        """Return the error that the core told."""
        return ERROR_BY_REASON.get(self.reason, InternalError)(
            self.message,
            field=self.field,
            retry_after_s=self.retry_after_s,
            metadata=self.metadata,
        )


class StreamEnd(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """End of one choice without an error; see scheduler_svc.core.request.events.Ended."""

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
    """Progress of one choice; `kind` is a ProgressKind number."""

    stream_id: int
    kind: int
    value: int


class StreamLogprobs(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Log probabilities of Q tokens; see tandem.link.logprobs for the last four columns."""

    stream: bytes
    """uint32 ``[Q]``: stream number of each token."""
    offset: bytes
    """int32 ``[Q]``: output offset of each token; negative for prompt tokens, -1 for the last."""
    chosen: bytes
    top_start: bytes
    top_token: bytes
    top: bytes
    rank: bytes = b""
    """int32 ``[Q]``: place of each prompt token among all ids; empty for outputs."""


class Update(msgspec.Struct, array_like=True, tag=14, frozen=True, kw_only=True):
    """
    News of some streams, one or a few messages per step and frontend: first tokens, then all else,
    which comes after the tokens. See scheduler_svc.ipc.token_run. Offsets let a frontend check that
    no token was lost when steps were merged.
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
    """Log probabilities of streams that asked; before or after their tokens, before their ends."""


class Reply(msgspec.Struct, array_like=True, tag=15, frozen=True, kw_only=True):
    """Answer to a `Query`; `error` is set instead of `result` when it failed."""

    query_id: int
    result: bytes
    error: Refused | None


class StepSpan(msgspec.Struct, array_like=True, tag=16, frozen=True, kw_only=True):
    """
    A step that computed requests whose spans are recorded, sent to one frontend, which makes its
    span. It may be lost. Durations are the executor's own, see `tandem.link.results.StepTimings`.
    """

    step_id: int
    session_epoch: int
    boot_id: str
    executor: str
    """Address of the executor, as operators know it."""
    sent_s: float
    applied_s: float
    num_prefills: int
    num_decodes: int
    prefill_tokens: int
    graph_tokens: int
    """Tokens, with padding, of the captured graph that ran; 0 for an eager step."""
    queued_ns: int
    forward_ns: int
    sample_ns: int
    compute_ns: int
    links: tuple[tuple[str, str], ...]
    """Trace id and span id of each traced request of the step, as in `Submit`."""
    num_left_out: int
    """Traced requests of the step for which there was no link left."""
    num_skipped: int
    """Steps since the one before that was told, which the bound left without a span."""


FrontendMessage = Hello | Submit | EndStream | Query
CoreMessage = Model | Availability | Accepted | Refused | Update | Reply | StepSpan

encode = msgspec.msgpack.Encoder().encode
_frontend_decoder: msgspec.msgpack.Decoder[FrontendMessage] = msgspec.msgpack.Decoder(
    FrontendMessage
)
_core_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
decode_from_frontend = _frontend_decoder.decode
decode_from_core = _core_decoder.decode
