"""The host's knowledge of a device's columns by slot, and the least patch that updates them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor_svc.slots.sampling import SlotSampling
from kernels.patch_rows import PackedRows, RowPatch
from tandem.link.batch import Int32Column
from tandem.link.slots.slot_state import SlotState

_UNKNOWN = -1


class SlotMirror:
    """
    The host's copy of the columns that decide a patch; a step that only continues the rows of the
    last one compares a few columns.

    Patches are written into columns named "row_slot", "position", "block_table" and as
    `SlotSampling.parameters` names them.
    """

    def __init__(self, num_slots: int, max_rows: int) -> None:
        self._row_slot = np.full(max_rows, _UNKNOWN, np.int32)
        self._num_rows = 0
        self._position = np.full(num_slots, _UNKNOWN, np.int32)
        self._num_blocks = np.zeros(num_slots, np.int32)
        self._has_sampling = np.zeros(num_slots, np.bool_)

    def forget(self) -> None:
        """Take it that the device knows no slot and has no rows."""
        self._row_slot.fill(_UNKNOWN)
        self._num_rows = 0
        self._position.fill(_UNKNOWN)
        self._num_blocks.fill(0)
        self._has_sampling.fill(False)

    def admitted(self, slot: int) -> None:
        """Note that a slot has a new sequence: the device's data of the slot are another's."""
        self._position[slot] = _UNKNOWN
        self._num_blocks[slot] = 0
        self._has_sampling[slot] = False

    def patch(
        self,
        packed: PackedRows,
        slot: Int32Column,
        start: Int32Column,
        slots: SlotState,
        sampling: SlotSampling,
    ) -> RowPatch | None:
        """
        Return the changes that the next step's rows need, and count them as sent; None if they need
        none. Arguments are as in `DecodeStep.prepare`.
        """
        patch = packed.patch()
        has_changed = self._place_rows(patch, slot)
        wrong = slot[self._position[slot] != start]
        if len(wrong):
            self._position[slot] = start
            patch.set_rows("position", wrong, self._position[wrong])
            has_changed = True
        if (self._num_blocks[slot] != slots.num_blocks_held[slot]).any():
            self._add_blocks(patch, slot, slots)
            has_changed = True
        fresh = slot[~self._has_sampling[slot]]
        if len(fresh):
            for name, column in sampling.parameters(fresh).items():
                patch.set_rows(name, fresh, column)
            self._has_sampling[fresh] = True
            has_changed = True
        return patch if has_changed else None

    def advance(self) -> int:
        """Note that the device moved its rows on by one token; return the number of rows."""
        self._position[self._row_slot[: self._num_rows]] += 1
        return self._num_rows

    def _place_rows(self, patch: RowPatch, slot: Int32Column) -> bool:
        num_rows, most = len(slot), max(len(slot), self._num_rows)
        wanted = np.full(most, _UNKNOWN, np.int32)
        wanted[:num_rows] = slot
        changed = (wanted != self._row_slot[:most]).nonzero()[0]
        self._num_rows = num_rows
        if not len(changed):
            return False
        self._row_slot[:most] = wanted
        patch.set_rows("row_slot", changed, wanted[changed])
        return True

    def _add_blocks(self, patch: RowPatch, slot: Int32Column, slots: SlotState) -> None:
        row, index = _missing(slot, self._num_blocks[slot], slots.num_blocks_held[slot])
        patch.set_entries("block_table", row, index, slots.block_table[row, index])
        self._num_blocks[slot] = slots.num_blocks_held[slot]


def _missing(
    slot: Int32Column, first: Int32Column, end: Int32Column
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return slot and index of the entries first to end of each slot's table, ``[E]`` each."""
    count = (end - first).astype(np.int64)
    begins = np.cumsum(count) - count
    index = np.arange(int(count.sum())) - np.repeat(begins - first, count)
    return np.repeat(slot.astype(np.int64), count), index
