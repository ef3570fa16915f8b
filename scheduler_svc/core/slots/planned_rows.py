"""Rows of a batch in flight, as the core remembers them until its result is applied."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.slots.decode_rows import DecodeRows
from tandem.link.batch import Int32Column, UInt32Column


@dataclass(slots=True, kw_only=True)  # never changed, but frozen=True would triple the cost
class PlannedRows:
    """
    Rows of one batch in flight, columns of shape ``[R]``; the first `num_decodes` are decodes.

    Attributes:
        slot: Slot of each row.
        generation: Generation of each slot.
        num_tokens: Tokens that each row computes.
        sampling_slot: Slots of the rows that sample, decodes first, shape ``[S]``.
        sampling_generation: Their generations.
        sampling_end: Positions of the tokens they sample.
        num_decodes: Number of rows that are decodes.
        decodes: Decode rows; None when there are none.
        num_departures: The slot table's `num_departures` when this was planned: while it is the
            same, all of these requests run in these slots.
        is_someones_last: True when a decode row computes the last token its request may compute.
    """

    slot: Int32Column
    generation: UInt32Column
    num_tokens: Int32Column
    sampling_slot: Int32Column
    sampling_generation: UInt32Column
    sampling_end: Int32Column
    num_decodes: int
    decodes: DecodeRows | None
    num_departures: int
    is_someones_last: bool
