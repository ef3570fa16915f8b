"""Results and statistics of an engine: requests, memory, metrics."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler_svc.core.observe.step_log import memory_text
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.request import RequestState as CoreState
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.link.logprobs import TokenLogprob
from tandem_embedded.errors import EngineError
from tandem_embedded.params import GenerationParams


class RequestState(enum.Enum):
    """
    State of a request.

    Legal transitions: PENDING to PREFILL to DECODE to COMPLETED; PREFILL and DECODE back to PENDING
    on preemption; PREFILL to COMPLETED with one output token; PENDING, PREFILL and DECODE to
    FAILED. COMPLETED and FAILED are final.
    """

    PENDING = "pending"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_active(self) -> bool:
        """True while the request holds KV blocks."""
        return self in {RequestState.PREFILL, RequestState.DECODE}

    @property
    def is_terminal(self) -> bool:
        """True if the state is final."""
        return self in {RequestState.COMPLETED, RequestState.FAILED}


STATE_OF_CORE: dict[CoreState, RequestState] = {
    CoreState.WAITING: RequestState.PENDING,
    CoreState.DRAINING: RequestState.PENDING,
    CoreState.PREFILL: RequestState.PREFILL,
    CoreState.DECODE: RequestState.DECODE,
    CoreState.PAUSED: RequestState.DECODE,
}
"""States of live requests by the core's states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedChoice:
    """
    One completion of a request, after its end.

    Attributes:
        output_text: Text of the output, without the token or the stop string that ended it; ""
            without a tokenizer.
        output_tokens: All output tokens, the one that ended the output included.
        finish_reason: Finish reason; None if the completion failed.
        error: Error that ended the completion; None if it ended well.
        stop_string: Stop string that ended the output, if one did.
        num_preemptions: Number of preemptions.
        margins: Margin by which each token won, if the engine collects margins; else empty.
        logprobs: Log probabilities of each token, if the request asked for them; else empty.
        prompt_logprobs: Those of the prompt's tokens from the second on, with ranks, told with the
            first choice; else empty.
    """

    output_text: str
    output_tokens: list[int]
    finish_reason: FinishReason | None
    error: EngineError | None
    stop_string: str | None = None
    num_preemptions: int = 0
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """True if the completion ended well."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """
    One request, after the end of all its choices; delivered once.

    Properties named as those of a choice, such as `output_text`, are those of the first choice.

    Attributes:
        request_id: Id that `submit_request` returned.
        choices: Completions of the request, as many as `n` asked for.
        num_prompt_tokens: Number of prompt tokens that were used.
        num_truncated_tokens: Number of oldest prompt tokens dropped under `Overlength.TRUNCATE`.
        num_cached_tokens: Number of prompt tokens found in the prefix cache, by the first choice.
        seed: Seed of the request; submitting it again with this seed gives the same tokens.
    """

    request_id: int
    choices: tuple[CompletedChoice, ...]
    num_prompt_tokens: int
    num_truncated_tokens: int
    num_cached_tokens: int
    seed: int

    @property
    def success(self) -> bool:
        """True if all choices ended well."""
        return self.error is None

    @property
    def error(self) -> EngineError | None:
        """Error of the first choice that failed; None if all ended well."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    @property
    def generated_tokens(self) -> int:
        """Number of output tokens of all choices."""
        return sum(len(choice.output_tokens) for choice in self.choices)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions of all choices."""
        return sum(choice.num_preemptions for choice in self.choices)

    @property
    def output_text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].output_text

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Log probabilities of the prompt's tokens, told with the first choice."""
        return self.choices[0].prompt_logprobs

    @property
    def output_tokens(self) -> list[int]:
        """Output tokens of the first choice."""
        return self.choices[0].output_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the first choice, if one did."""
        return self.choices[0].stop_string

    @property
    def margins(self) -> list[float]:
        """Margins of the first choice."""
        return self.choices[0].margins

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log probabilities of the first choice."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """
    A snapshot of a live request, or a request to add; `created_at` is in seconds of the engine's
    clock.

    For a live request, `output_tokens` are those of the first choice, and `params` those in force.
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
    Numbers of KV blocks; `used_blocks` + `free_blocks` == `total_blocks`. Blocks that only the
    prefix cache holds count as free. `num_sequences` is the number of sequences that hold blocks.
    """

    total_blocks: int
    used_blocks: int
    free_blocks: int
    num_sequences: int

    @classmethod
    def of(cls, stats: Stats, num_sequences: int) -> MemoryStats:
        """Return the memory statistics in a core's statistics."""
        return cls(
            total_blocks=stats.total_blocks,
            used_blocks=stats.used_blocks,
            free_blocks=stats.free_blocks + stats.cached_blocks,
            num_sequences=num_sequences,
        )

    @property
    def utilization(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return self.used_blocks / self.total_blocks

    def __str__(self) -> str:
        return memory_text(self.used_blocks, self.total_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """
    Counts since the engine was created.

    `total_requests` were accepted; of them `completed_requests` ended well, `failed_requests` by an
    error, and `active_sequences` are in the system; each choice counts. `memory_utilization` is 0
    to 1. `steps_by_runner` are the steps that each runner of this process was sent.
    """

    total_requests: int
    completed_requests: int
    failed_requests: int
    total_tokens_generated: int
    memory_utilization: float
    active_sequences: int
    preemptions: int
    steps: int
    steps_by_runner: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        stats: Stats,
        num_requests: int,
        steps_by_runner: tuple[int, ...],
        *,
        num_failed_at_end: int,
    ) -> EngineMetrics:
        """
        Return the metrics in a core's statistics.

        Args:
            stats: The statistics.
            num_requests: Number of requests in the system.
            steps_by_runner: Number of steps of each runner.
            num_failed_at_end: Number of requests that ended well for the core, which makes no text,
                and failed as theirs could not be made.
        """
        return cls(
            total_requests=stats.accepted_requests,
            completed_requests=stats.finished_requests - num_failed_at_end,
            failed_requests=stats.failed_requests + num_failed_at_end,
            total_tokens_generated=stats.output_tokens,
            memory_utilization=stats.token_usage,
            active_sequences=num_requests,
            preemptions=stats.preemptions,
            steps=stats.steps,
            steps_by_runner=steps_by_runner,
        )
