"""
Block tables of the slots, and their part of the state hash.

In a decode step a few rows get a block each, and their block tables are not read. Such blocks enter
the hash at once, since the step carries it, but are written into the tables only when a table is
read, or when there are `MAX_LATE` steps of them.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.geometry import BlockIds, Limits
from scheduler_svc.core.slots.decode_rows import GrowingRows
from tandem.link.batch import Int32Column
from tandem.link.slots.state_hash import BlockKeys

MAX_LATE = 64
"""Number of steps with unwritten blocks at which these are written."""

_Blocks: TypeAlias = tuple[NDArray[np.intp], NDArray[np.intp], BlockIds]


class SlotBlocks:
    """
    Block tables of all slots; owned by the slot table. Sums of hash terms are not reduced.

    Attributes:
        block_size: Tokens per block.
    """

    __slots__ = ("_base", "_flat", "_keys", "_late", "_num_blocks", "_table", "block_size")

    def __init__(self, limits: Limits) -> None:
        n, width = limits.num_slots, limits.max_blocks_per_seq
        self.block_size = limits.block_size
        self._num_blocks = np.zeros(n, np.intp)
        self._table = np.zeros((n, width), np.int32)
        self._flat = self._table.reshape(-1)
        self._base = np.arange(n) * width
        self._keys = BlockKeys(n, width, limits.num_blocks)
        self._late: list[_Blocks] = []

    @property
    def num_blocks(self) -> NDArray[np.intp]:
        """Number of blocks of each slot, shape ``[slots]``."""
        self._write()
        return self._num_blocks

    @property
    def table(self) -> Int32Column:
        """Block ids, shape ``[slots, max_blocks_per_seq]``, meaningful up to `num_blocks`."""
        self._write()
        return self._table

    def of_slot(self, slot: int) -> Int32Column:
        """Return the ids of a slot's blocks, in order."""
        return self.table[slot, : self._num_blocks[slot]]

    def begin(self, slot: int, blocks: Int32Column) -> int:
        """Give a slot its first blocks; returns the sum of their terms."""
        self._write()
        self._num_blocks[slot] = len(blocks)
        self._table[slot, : len(blocks)] = blocks
        return self._keys.sum_of_table(slot, blocks)

    def end(self, slot: int) -> tuple[Int32Column, int]:
        """Take a slot's blocks away; returns them and the sum of their terms."""
        self._write()
        blocks = self._table[slot, : self._num_blocks[slot]].copy()
        self._num_blocks[slot] = 0
        return blocks, self._keys.sum_of_table(slot, blocks)

    def last_of(self, slots: NDArray[np.intp]) -> Int32Column:
        """Return the last block of each of these slots, all of which have a block."""
        last: Int32Column = self._flat[self._base[slots] + self.num_blocks[slots] - 1]
        return last

    def append(self, slots: NDArray[np.intp], blocks: BlockIds) -> int:
        """Give each of these slots, none twice, one more block; returns the sum of the terms."""
        index = self.num_blocks[slots]
        self._write_blocks(slots, index, blocks)
        return self._keys.sum_of_entries(slots, index, blocks)

    def append_due(self, growing: GrowingRows, blocks: BlockIds) -> int:
        """Do the same as `append` for rows that fill their blocks before the same steps."""
        index, keys = growing.index, growing.keys
        if index is None:
            index, keys = self.num_blocks[growing.slot], self._keys.of_slots(growing.slot)
        growing.note_appended(index, blocks, keys)
        self._late.append((growing.slot, index, blocks))
        if len(self._late) == MAX_LATE:
            self._write()
        return self._keys.sum_with_keys(keys, index, blocks)

    def check_integrity(self, live: NDArray[np.bool_]) -> None:
        """
        Compare the numbers of blocks with the slots that the executor holds, shape ``[slots]``.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        is_right = (self.num_blocks > 0) == live
        require(bool(is_right.all()), "a live slot has no block, or a free one has some")
        is_ahead = self.num_blocks > self.table.shape[1]
        require(not is_ahead.any(), "a slot has more blocks than its table")

    def _write(self) -> None:
        """Write the blocks kept so far into the tables."""
        if not self._late:
            return
        slots, index, blocks = zip(*self._late, strict=True)
        self._late = []
        # A slot may be listed twice: then its later count is written last, and stays.
        self._write_blocks(np.concatenate(slots), np.concatenate(index), np.concatenate(blocks))

    def _write_blocks(
        self, slots: NDArray[np.intp], index: NDArray[np.intp], blocks: BlockIds
    ) -> None:
        self._flat[self._base[slots] + index] = blocks
        self._num_blocks[slots] = index + 1
