"""
Values that travel over the step link, free of any encoding: batches and commands from the core,
results from the executor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.link.logprobs import LogprobColumns
from tandem.sampling_params import SamplingParams

Int32Column: TypeAlias = NDArray[np.int32]
UInt32Column: TypeAlias = NDArray[np.uint32]
UInt8Column: TypeAlias = NDArray[np.uint8]
Float32Column: TypeAlias = NDArray[np.float32]

ROW_SAMPLES = np.uint8(1)
"""Row flag: sample the token that follows the row's last computed position."""


_NO_INT32: Int32Column = np.empty(0, np.int32)
_NO_UINT8: UInt8Column = np.empty(0, np.uint8)
_NO_INT32.flags.writeable = _NO_UINT8.flags.writeable = False


def _no_int32() -> Int32Column:
    return _NO_INT32


def _no_uint8() -> UInt8Column:
    return _NO_UINT8


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """
    Whole state of a slot, sent once when a request is admitted.

    `token_ids` is the prompt plus, after a preemption or recovery, the outputs; the first
    `num_cached_tokens` of them already have KV in `block_ids`. `generation` strictly grows per slot
    within a session.
    """

    slot: int
    generation: int
    token_ids: Int32Column
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: Int32Column
    sampling: SamplingParams


@dataclass(slots=True, kw_only=True)  # never changed; frozen would take three times as long to make
class Batch:
    """
    Delta of one step against the slot state that both ends hold; columns of a group have equal
    lengths.

    The effects happen in this order: release, swap out, copy, swap in, admit, append, forward.
    `row_start` equals the slot's planned length before the batch. Rows are in batch order, decodes
    (one token) first; no slot has two rows. `swap_out_*` copies device blocks to host blocks,
    `swap_in_*` host blocks to device blocks; host blocks have their own numbers, from 1.

    `rows_version` stays on this end: batches with the same one, other than 0, have equal columns
    `row_slot`, `row_num_tokens` and `row_flags`.
    """

    admits: tuple[Admission, ...] = ()
    row_slot: Int32Column = field(default_factory=_no_int32)
    row_num_tokens: Int32Column = field(default_factory=_no_int32)
    row_start: Int32Column = field(default_factory=_no_int32)
    row_flags: UInt8Column = field(default_factory=_no_uint8)
    rows_version: int = 0
    append_slot: Int32Column = field(default_factory=_no_int32)
    append_block: Int32Column = field(default_factory=_no_int32)
    release_slot: Int32Column = field(default_factory=_no_int32)
    copy_source: Int32Column = field(default_factory=_no_int32)
    copy_destination: Int32Column = field(default_factory=_no_int32)
    swap_out_block: Int32Column = field(default_factory=_no_int32)
    swap_out_host: Int32Column = field(default_factory=_no_int32)
    swap_in_host: Int32Column = field(default_factory=_no_int32)
    swap_in_block: Int32Column = field(default_factory=_no_int32)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed by this batch."""
        return int(self.row_num_tokens.sum())


class KvMode(enum.Enum):
    """Treatment of the KV memory during a suspension."""

    PERSIST = 1
    OFFLOAD = 2
    RECOMPUTE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Stop computing until `Resume`."""

    kv_mode: KvMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """End a suspension."""


Command: TypeAlias = Batch | Suspend | Resume


@dataclass(slots=True, kw_only=True)  # never changed; frozen would take three times as long to make
class Step:
    """Command with its place in the session; `step_id` counts 1, 2, 3, ... without a gap."""

    session_epoch: int
    step_id: int
    acked_step_id: int
    state_hash: int
    command: Command


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


@dataclass(slots=True, kw_only=True)  # never changed; frozen would take three times as long to make
class StepResult:
    """
    Result of one step: `(slot, generation, position, token)` for each row that sampled, in batch
    order.

    `position` is the token's index in its sequence, so a late result can always be attributed.
    `margin` (float32) is present only if the runner was told to collect it, `logprobs` only if a
    row asked for its log probabilities. `graph` is the number of tokens, with padding, of the CUDA
    graph that ran; 0 if none did.
    """

    boot_id: str
    step_id: int
    slot: Int32Column
    generation: UInt32Column
    position: Int32Column
    token: Int32Column
    row_errors: tuple[RowError, ...] = ()
    timings: StepTimings = StepTimings()
    graph: int = 0
    device_memory_bytes: int = 0
    margin: Float32Column | None = None
    logprobs: LogprobColumns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """Failure of a whole step, which ends the session; `reason` is a name of the error table."""

    boot_id: str
    step_id: int
    reason: str
    message: str
    sticky: bool = False
