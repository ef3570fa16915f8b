"""What the host knows a device to hold by slot, and from it the least that must be sent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor_svc.slots.sampling import SlotSampling
from kernels.patch_rows import PackedRows, RowPatch
from tandem.link.batch import Int32Column
from tandem.link.slot_state import SlotState

_UNKNOWN = -1


class SlotMirror:
    """
    Host's copy of what decides a patch; a step in which rows only go on compares a few columns.

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
        """The device knows nothing, and has no rows."""
        self._row_slot.fill(_UNKNOWN)
        self._num_rows = 0
        self._position.fill(_UNKNOWN)
        self._num_blocks.fill(0)
        self._has_sampling.fill(False)

    def admitted(self, slot: int) -> None:
        """What the device holds of a slot is another sequence's."""
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
        Changes that the next step's rows need, which count as sent; None where they need none.
        Arguments as in `DecodeStep.prepare`.
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
        """The device moved its rows on by one token; says how many rows these are."""
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
    """Slot and index of the entries first to end of each slot's table, ``[E]`` each."""
    count = (end - first).astype(np.int64)
    begins = np.cumsum(count) - count
    index = np.arange(int(count.sum())) - np.repeat(begins - first, count)
    return np.repeat(slot.astype(np.int64), count), index
