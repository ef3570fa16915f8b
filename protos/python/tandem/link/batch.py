"""Batch of one step as the core plans it, free of any encoding, and the types of its columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.sampling_params import SamplingParams

Int32Column: TypeAlias = NDArray[np.int32]
UInt32Column: TypeAlias = NDArray[np.uint32]
UInt8Column: TypeAlias = NDArray[np.uint8]
Float32Column: TypeAlias = NDArray[np.float32]

ROW_SAMPLES = np.uint8(1)
"""Row flag: sample the token that follows the row's last computed position."""
NO_INT32: Int32Column = np.empty(0, np.int32)
"""The empty column, one for all: it cannot be written."""
_NO_UINT8: UInt8Column = np.empty(0, np.uint8)
NO_INT32.flags.writeable = _NO_UINT8.flags.writeable = False


def no_int32() -> Int32Column:
    """Return the empty column, for the default of a field."""
    return NO_INT32


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
    row_slot: Int32Column = field(default_factory=no_int32)
    row_num_tokens: Int32Column = field(default_factory=no_int32)
    row_start: Int32Column = field(default_factory=no_int32)
    row_flags: UInt8Column = field(default_factory=_no_uint8)
    rows_version: int = 0
    append_slot: Int32Column = field(default_factory=no_int32)
    append_block: Int32Column = field(default_factory=no_int32)
    release_slot: Int32Column = field(default_factory=no_int32)
    copy_source: Int32Column = field(default_factory=no_int32)
    copy_destination: Int32Column = field(default_factory=no_int32)
    swap_out_block: Int32Column = field(default_factory=no_int32)
    swap_out_host: Int32Column = field(default_factory=no_int32)
    swap_in_host: Int32Column = field(default_factory=no_int32)
    swap_in_block: Int32Column = field(default_factory=no_int32)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed by this batch."""
        return int(self.row_num_tokens.sum())
