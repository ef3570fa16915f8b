"""What an engine tells about its requests and itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler_svc.core.observe.stats import CoreStats
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.request import RequestState as CoreState
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

    @property
    def is_active(self) -> bool:
        """True while it holds KV blocks."""
        return self in {RequestState.PREFILL, RequestState.DECODE}

    @property
    def is_terminal(self) -> bool:
        """True once it never changes any more."""
        return self in {RequestState.COMPLETED, RequestState.FAILED}


STATE_OF_CORE: dict[CoreState, RequestState] = {
    CoreState.WAITING: RequestState.PENDING,
    CoreState.DRAINING: RequestState.PENDING,
    CoreState.PREFILL: RequestState.PREFILL,
    CoreState.DECODE: RequestState.DECODE,
    CoreState.PAUSED: RequestState.DECODE,
}
"""A live request's state as the core names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedChoice:
    """
    One of a request's completions that is over.

    Attributes:
        output_text: Text of the output, without the token or the stop string that ended it; ""
            without a tokenizer.
        output_tokens: All output tokens, the one that ended it included.
        finish_reason: Why it ended; None when it failed.
        error: Why it failed; None when it ended well.
        stop_string: The stop string that ended it, where one did.
        num_preemptions: How often its blocks were needed elsewhere.
        margins: By how much each token won, where the engine collects that; else empty.
        logprobs: Of each token, where the request asked; else empty.
    """

    output_text: str
    output_tokens: list[int]
    finish_reason: FinishReason | None
    error: EngineError | None
    stop_string: str | None = None
    num_preemptions: int = 0
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """True when it ended well."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """
    One request of which all choices are over; delivered once.

    What a choice has, such as `output_text`, this has of the first one.

    Attributes:
        request_id: As `submit_request` returned it.
        choices: Its completions, as many as `n` asked for.
        num_prompt_tokens: Tokens of the prompt that were used.
        num_truncated_tokens: Its oldest tokens, dropped under `Overlength.TRUNCATE`.
        num_cached_tokens: Tokens of the prompt whose KV was found in the prefix cache.
        seed: Seed it drew with; submitting it again with this one gives the same tokens.
    """

    request_id: int
    choices: tuple[CompletedChoice, ...]
    num_prompt_tokens: int
    num_truncated_tokens: int
    num_cached_tokens: int
    seed: int

    @property
    def success(self) -> bool:
        """True when all choices ended well."""
        return self.error is None

    @property
    def error(self) -> EngineError | None:
        """Why the first choice failed that did; None when all ended well."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    @property
    def generated_tokens(self) -> int:
        """How many output tokens there are, of all choices."""
        return sum(len(choice.output_tokens) for choice in self.choices)

    @property
    def num_preemptions(self) -> int:
        """How often blocks were needed elsewhere, over all choices."""
        return sum(choice.num_preemptions for choice in self.choices)

    @property
    def output_text(self) -> str:
        """See CompletedChoice."""
        return self.choices[0].output_text

    @property
    def output_tokens(self) -> list[int]:
        """See CompletedChoice."""
        return self.choices[0].output_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """See CompletedChoice."""
        return self.choices[0].finish_reason

    @property
    def stop_string(self) -> str | None:
        """See CompletedChoice."""
        return self.choices[0].stop_string

    @property
    def margins(self) -> list[float]:
        """See CompletedChoice."""
        return self.choices[0].margins

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """See CompletedChoice."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """
    A live request as it is now, or one to be; `created_at` is on the engine's clock, seconds.

    `output_tokens` are those of the first choice, and `params` those in force.
    """

    request_id: int
    input_tokens: list[int]
    params: GenerationParams = field(default_factory=GenerationParams)
    output_tokens: list[int] = field(default_factory=list)
    state: RequestState = RequestState.PENDING
    created_at: float = 0.0

    @property
    def max_tokens(self) -> int | None:
        """See GenerationParams."""
        return self.params.max_tokens

    @property
    def temperature(self) -> float | None:
        """See GenerationParams."""
        return self.params.temperature

    @property
    def top_p(self) -> float | None:
        """See GenerationParams."""
        return self.params.top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """
    KV blocks; `used_blocks` + `free_blocks` == `total_blocks`, where what only the prefix cache
    keeps is free. `num_sequences` hold some of those in use.
    """

    total_blocks: int
    used_blocks: int
    free_blocks: int
    num_sequences: int

    @classmethod
    def of(cls, stats: CoreStats) -> MemoryStats:
        """Of a core's figures."""
        return cls(
            total_blocks=stats.total_blocks,
            used_blocks=stats.used_blocks,
            free_blocks=stats.free_blocks + stats.cached_blocks,
            num_sequences=stats.num_running - stats.num_draining,
        )

    @property
    def utilization(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return self.used_blocks / self.total_blocks

    def __str__(self) -> str:
        used, total = self.used_blocks, self.total_blocks
        return f"Memory usage: {used}/{total} blocks ({100 * self.utilization:.1f}%)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """
    Counts since the engine was made.

    `total_requests` were accepted; of them `completed_requests` ended well, `failed_requests` by an
    error, and `active_sequences` are in the system; each choice counts. `memory_utilization` is 0
    to 1.
    """

    total_requests: int
    completed_requests: int
    failed_requests: int
    total_tokens_generated: int
    memory_utilization: float
    active_sequences: int
    preemptions: int
    steps: int

    @classmethod
    def of(cls, stats: CoreStats, num_requests: int) -> EngineMetrics:
        """Of a core's figures."""
        return cls(
            total_requests=stats.accepted_requests,
            completed_requests=stats.finished_requests,
            failed_requests=stats.failed_requests,
            total_tokens_generated=stats.output_tokens,
            memory_utilization=stats.used_blocks / stats.total_blocks,
            active_sequences=num_requests,
            preemptions=stats.preemptions,
            steps=stats.steps,
        )
