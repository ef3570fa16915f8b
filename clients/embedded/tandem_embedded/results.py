"""What an engine tells about its requests and itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.request import RequestState as CoreState
from tandem.link.logprobs import TokenLogprob
from tandem_embedded.errors import EngineError
from tandem_embedded.params import GenerationParams


class RequestState(enum.Enum):
    """
    Where a request is.

    Legal moves: PENDING to PREFILL to DECODE to COMPLETED; PREFILL and DECODE back to PENDING when
    its blocks are needed elsewhere; PREFILL to COMPLETED with one output token; any but the two
    last to FAILED. COMPLETED and FAILED never change.
    """

    PENDING = "pending"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPLETED = "completed"
    FAILED = "failed"


STATE_OF_CORE: dict[CoreState, RequestState] = {
    CoreState.WAITING: RequestState.PENDING,
    CoreState.DRAINING: RequestState.PENDING,
    CoreState.PREFILL: RequestState.PREFILL,
    CoreState.DECODE: RequestState.DECODE,
    CoreState.PAUSED: RequestState.DECODE,
}
"""A live request's state as the core names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """
    One request that is over; delivered once.

    Attributes:
        request_id: As `submit_request` returned it.
        output_text: Text of the output, without the token that ended it; "" without a tokenizer.
        output_tokens: All output tokens, the ending one included.
        finish_reason: Why it ended; None when it failed.
        error: Why it failed; None when it ended well.
        num_prompt_tokens: Tokens of the prompt that were used.
        num_truncated_tokens: Its oldest tokens, dropped under `Overlength.TRUNCATE`.
        num_cached_tokens: Tokens of the prompt whose KV was found in the prefix cache.
        seed: Seed it drew with; submitting it again with this one gives the same tokens.
        num_preemptions: How often its blocks were needed elsewhere.
        margins: By how much each token won, where the engine collects that; else empty.
        logprobs: Of each token, where the request asked; else empty.
    """

    request_id: int
    output_text: str
    output_tokens: list[int]
    finish_reason: FinishReason | None
    error: EngineError | None
    num_prompt_tokens: int
    num_truncated_tokens: int
    num_cached_tokens: int
    seed: int
    num_preemptions: int
    margins: list[float]
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """True when it ended well."""
        return self.error is None

    @property
    def generated_tokens(self) -> int:
        """How many output tokens there are."""
        return len(self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A live request as it is now; `created_at` is on the engine's clock, seconds."""

    request_id: int
    input_tokens: list[int]
    output_tokens: list[int]
    params: GenerationParams
    state: RequestState
    created_at: float

    @property
    def max_tokens(self) -> int:
        """See GenerationParams."""
        return self.params.max_tokens

    @property
    def temperature(self) -> float:
        """See GenerationParams."""
        return self.params.temperature

    @property
    def top_p(self) -> float:
        """See GenerationParams."""
        return self.params.top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """
    KV blocks; `used` + `free` == `total`, where what only the prefix cache keeps is free.
    `num_sequences` hold some of those in use.
    """

    total: int
    used: int
    free: int
    num_sequences: int

    def __str__(self) -> str:
        return (
            f"Memory usage: {self.used}/{self.total} blocks ({100 * self.used / self.total:.1f}%)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """
    Counts since the engine was made.

    `total_requests` were accepted; of them `completed_requests` ended well, `failed_requests` by an
    error, and `active_sequences` are in the system. `memory_utilization` is 0 to 1.
    """

    total_requests: int
    completed_requests: int
    failed_requests: int
    total_tokens_generated: int
    memory_utilization: float
    active_sequences: int
    preemptions: int
    steps: int
