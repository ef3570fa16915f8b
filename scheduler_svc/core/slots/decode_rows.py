"""
Rows of a step in which the same slots decode as in the step before of the same lane.

Most steps compute one token for the same requests as the last one. The data that such steps share
is kept in one object, made when a slot starts or stops decoding, and a step then costs a few array
operations however much is known of each row. Its `version` tells code that a step repeats the rows
of an earlier one. The rows that need a block are known in advance: each row fills a block every
`block_size` steps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.geometry import BlockIds
from tandem.link.batch import ROW_SAMPLES, Int32Column, UInt8Column, UInt32Column

_NO_KEY: NDArray[np.uint64] = np.empty(0, np.uint64)


class RowConstants:
    """Columns that are the same for any decode rows, shape ``[slots]``; a slice of them is used."""

    __slots__ = ("flags", "num_tokens")

    def __init__(self, num_slots: int) -> None:
        self.num_tokens: Int32Column = np.ones(num_slots, np.int32)
        self.flags: UInt8Column = np.full(num_slots, ROW_SAMPLES, np.uint8)
        for column in (self.num_tokens, self.flags):
            column.flags.writeable = False


class GrowingRows:
    """
    Decode rows that need a block for the step being planned, shape ``[G]``, and what is known of
    their next blocks.

    Attributes:
        is_periodic: True when the rows fill their blocks before the same steps, so that this object
            is used again for the next block of each.
        slot: Slot of each row.
        row_slot: The same as a column of the batch.
        ones: 1 for each row.
        index: Index of each row's next block in its table; None until the first is appended.
        keys: Keys of the slots in the state hash, set once `index` is.
        next: Id behind the block that each row got last; None until the first is appended.
    """

    __slots__ = ("index", "is_periodic", "keys", "next", "ones", "row_slot", "slot")

    def __init__(self, slot: NDArray[np.intp], *, is_periodic: bool = False) -> None:
        self.is_periodic = is_periodic
        self.slot = slot
        self.row_slot: Int32Column = slot.astype(np.int32)
        self.ones: NDArray[np.intp] = np.ones(len(slot), np.intp)
        self.index: NDArray[np.intp] | None = None
        self.keys: NDArray[np.uint64] = _NO_KEY
        self.next: NDArray[np.intp] | None = None

    def note_appended(
        self, index: NDArray[np.intp], blocks: BlockIds, keys: NDArray[np.uint64]
    ) -> None:
        """Note the blocks that the rows got, the indexes of these, and the keys of the slots."""
        self.index = index + self.ones
        self.next = blocks + self.ones
        self.keys = keys


class DecodeRows:
    """
    Rows that compute one token each; all columns but `start` stay as they are, shape ``[R]``.

    Attributes:
        num_rows: Number of these rows.
        version: Number of these rows, larger than that of any rows before; 0 for rows of one step.
        slot: Slot of each row, none twice.
        row_slot: The same as a column of the batch.
        num_tokens: 1 for each row.
        flags: Row flags: each row samples.
        generation: Generation of each slot.
        handle: Handle of each request.
        prompt_len: Tokens of each prompt.
        key_sum: Number that a step of all these rows adds to the state hash.
        start: Position that each row computes next; a new array for each step.
        num_left: Number of steps until one of the rows has nothing left to compute.
    """

    __slots__ = (
        "_block_size",
        "_is_ahead",
        "_num_steps",
        "_ring",
        "_seen_s",
        "_spare",
        "flags",
        "generation",
        "handle",
        "key_sum",
        "num_left",
        "num_rows",
        "num_tokens",
        "prompt_len",
        "row_slot",
        "slot",
        "start",
        "version",
    )

    def __init__(
        self,
        slot: NDArray[np.intp],
        *,
        version: int,
        constants: RowConstants,
        generation: UInt32Column,
        handle: NDArray[np.int64],
        prompt_len: Int32Column,
        start: Int32Column,
        capacity: NDArray[np.intp],
        stop_len: Int32Column,
        key_sum: int,
        block_size: int,
    ) -> None:
        """
        Args:
            slot: See the attributes.
            version: See the attributes.
            constants: Columns that all decode rows share, of at least this length.
            generation: See the attributes.
            handle: See the attributes.
            prompt_len: See the attributes.
            start: See the attributes.
            capacity: Number of positions that each slot's blocks hold.
            stop_len: Tokens at which each request ends; the last is never computed.
            key_sum: See the attributes.
            block_size: Tokens per block.
        """
        self.version = version
        self.slot = slot
        self.num_rows = num_rows = len(slot)
        self.row_slot: Int32Column = slot.astype(np.int32)
        self.num_tokens = constants.num_tokens[:num_rows]
        self.flags = constants.flags[:num_rows]
        self.generation = generation
        self.handle = handle
        self.prompt_len = prompt_len
        self.start = start
        self.key_sum = key_sum
        self.num_left = int((stop_len - start).min()) - 1 if num_rows else 0
        self._seen_s: float | None = None
        """Time of the latest token of all rows; None if they did not get it at one time."""
        self._block_size = block_size
        self._spare: NDArray[np.intp] = capacity - start
        self._ring: list[GrowingRows] | None = None
        self._num_steps = 0
        self._is_ahead = False
        """True while the slot table's column of planned tokens is behind `start`."""
        # Code that gets the same version again relies on their contents.
        for column in (slot, self.row_slot, generation, handle):
            column.flags.writeable = False

    def full(self) -> GrowingRows | None:
        """
        Return the rows that have no block yet for the position of this step; None where only the
        block table tells, since a slot had a whole block to spare.
        """
        if not self._num_steps:
            return GrowingRows(self.slot[self._spare == 0])
        if self._ring is None:  # A second step of the same rows: there will probably be more.
            self._ring = self._by_phase()
        return self._ring[self._num_steps % self._block_size] if self._ring else None

    def forget_turns(self) -> None:
        """Drop the precomputed turns, since a slot got a block out of turn."""
        self._ring = None

    def advance(self) -> Int32Column:
        """Note that a step computes one token of each row; returns the positions after these."""
        self.start = self.start + self.num_tokens
        self._num_steps += 1
        self._is_ahead = True
        self.num_left -= 1
        return self.start

    def note_seen(self, now: float) -> float | None:
        """
        Note `now` as the time at which all rows got a token; returns the seconds since the one
        before, or None if they did not get that at one time.
        """
        before, self._seen_s = self._seen_s, now
        return None if before is None else now - before

    def take_start(self) -> Int32Column | None:
        """Return `start` where the slot table's column is behind it, which the table mends."""
        if not self._is_ahead:
            return None
        self._is_ahead = False
        return self.start

    def check_integrity(self, fresh: DecodeRows) -> None:
        """
        Compare rows that are kept from step to step with rows of the same slots made anew.

        Raises:
            InternalError: A column or count differs.
        """
        for name in ("slot", "generation", "handle", "prompt_len", "start"):
            is_same = np.array_equal(getattr(self, name), getattr(fresh, name))
            require(is_same, f"kept decode rows have another {name} than the slots")
        require(self.key_sum == fresh.key_sum, "kept decode rows have the keys of other slots")
        require(self.num_left == fresh.num_left, "kept decode rows end at another step")

    def _by_phase(self) -> list[GrowingRows]:
        """
        Return the rows that need a block before step i of every `block_size`, i from 0 on; nothing
        if a slot has a whole block to spare, so that it misses a turn.
        """
        if self._spare.max() >= self._block_size:
            return []
        order = self._spare.argsort(kind="stable")
        bounds = self._spare[order].searchsorted(np.arange(self._block_size + 1)).tolist()
        ordered = self.slot[order]
        return [
            GrowingRows(ordered[start:stop], is_periodic=True) for start, stop in pairwise(bounds)
        ]
