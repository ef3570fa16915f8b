"""One batch while it is being planned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.state import CoreState, PlannedRows
from tandem.link.batch import ROW_SAMPLES, Admission, Batch, Int32Column, UInt8Column

_NO_INT32 = np.empty(0, np.int32)
_NO_SLOT = np.empty(0, np.intp)


class Draft:
    """The batch being planned; state is changed as rows are added."""

    __slots__ = (
        "admits",
        "append_block",
        "append_slot",
        "budget",
        "decodes",
        "num_preempted",
        "prefills",
        "released",
        "state",
    )

    def __init__(self, state: CoreState) -> None:
        self.state = state
        self.budget = state.limits.max_total_tokens
        self.released: list[int] = []
        self.decodes: NDArray[np.intp] = _NO_SLOT
        self.append_slot: Int32Column = _NO_INT32
        self.append_block: Int32Column = _NO_INT32
        self.prefills: list[tuple[int, int, int]] = []
        """(slot, tokens, flags) per prefill row."""
        self.admits: list[Admission] = []
        self.num_preempted = 0

    def release_ended(self) -> None:
        """Free every slot whose request went."""
        for slot in self.state.slots.ended:
            self.state.release(slot)
            self.released.append(slot)
        self.state.slots.ended.clear()

    def batch(self) -> Batch | None:
        """The finished batch, noted as in flight; None when there is nothing to send."""
        num_decodes = len(self.decodes)
        if not num_decodes and not self.prefills and not self.released:
            return None
        slots = self.state.slots
        slot = self.decodes
        num_tokens: Int32Column = np.ones(num_decodes, np.int32)
        flags: UInt8Column = np.full(num_decodes, ROW_SAMPLES, np.uint8)
        if self.prefills:
            columns = np.array(self.prefills, np.int32)
            slot = np.concatenate([slot, columns[:, 0]])
            num_tokens = np.concatenate([num_tokens, columns[:, 1]])
            flags = np.concatenate([flags, columns[:, 2].astype(np.uint8)])
        start = slots.planned[slot]
        if len(slot):
            slots.advance(slot, start + num_tokens)
        self._note_in_flight(slot, num_tokens, flags)
        return Batch(
            admits=tuple(self.admits),
            row_slot=slot.astype(np.int32),
            row_num_tokens=num_tokens,
            row_start=start,
            row_flags=flags,
            append_slot=self.append_slot,
            append_block=self.append_block,
            release_slot=np.array(self.released, np.int32) if self.released else _NO_INT32,
        )

    def _note_in_flight(
        self, slot: NDArray[np.intp], num_tokens: Int32Column, flags: UInt8Column
    ) -> None:
        generation = self.state.slots.generation[slot]
        samples = slice(None) if not self.prefills else flags == ROW_SAMPLES
        self.state.in_flight.append(
            PlannedRows(
                slot=slot,
                generation=generation,
                num_tokens=num_tokens,
                sampling_slot=slot[samples],
                sampling_generation=generation[samples],
                num_decodes=len(self.decodes),
            )
        )
