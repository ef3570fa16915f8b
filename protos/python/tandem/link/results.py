"""Result of one step as the executor returns it, free of any encoding."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tandem.link.batch import Float32Column, Int32Column, UInt32Column
from tandem.link.logprobs import LogprobColumns, PromptLogprobColumns


class RowErrorKind(enum.Enum):
    """Kind of error of one row."""

    INVALID_LOGITS = 1
    TOKEN_OUT_OF_RANGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Failure of one row; the other rows of the step are not affected."""

    slot: int
    generation: int
    kind: RowErrorKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Durations of the parts of a step, in nanoseconds on the executor's monotonic clock."""

    queued_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    total_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """The step's time without its time in the executor's queue."""
        return self.total_ns - self.queued_ns


# A frozen result would take three times as long to make. Only the executor's thread that sends one
# changes it, to have the times until then in `timings`.
@dataclass(slots=True, kw_only=True)
class StepResult:
    """
    Result of one step: `(slot, generation, position, token)` for each row that sampled, in batch
    order.

    `position` is the token's index in its sequence, so a late result can always be attributed.
    `margin` (float32) is present only if the runner was told to collect it, `logprobs` only if a
    row asked for its log probabilities, `prompt_logprobs` only if a row computed a position whose
    prompt token is asked for. `graph` is the number of tokens, with padding, of the CUDA
    graph that ran; 0 if none did.
    """

    boot_id: str
    step_id: int
    slot: Int32Column
    generation: UInt32Column
    position: Int32Column
    token: Int32Column
    row_errors: tuple[RowError, ...] = ()
    timings: StepTimings = field(default_factory=StepTimings)
    graph: int = 0
    device_memory_bytes: int = 0
    margin: Float32Column | None = None
    logprobs: LogprobColumns | None = None
    prompt_logprobs: PromptLogprobColumns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """Failure of a whole step, which ends the session; `reason` is a name of the error table."""

    boot_id: str
    step_id: int
    reason: str
    message: str
    sticky: bool = False
