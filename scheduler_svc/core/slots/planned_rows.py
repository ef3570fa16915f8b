"""What the core remembers of a batch until its result is applied."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.slots.decode_rows import DecodeRows
from tandem.link.batch import Int32Column, UInt32Column


@dataclass(slots=True, kw_only=True)  # a value too, but freezing would triple its making
class PlannedRows:
    """
    The rows of one batch in flight, columns of shape ``[R]``, the first `num_decodes` are decodes.

    Attributes:
        slot: Slot of each row.
        generation: Its generation.
        num_tokens: Tokens it computes.
        sampling_slot: Slots of the rows that sample, decodes first, shape ``[S]``.
        sampling_generation: Their generations.
        sampling_end: Positions of the tokens they sample.
        num_decodes: Rows that are decodes.
        decodes: Those; None when there are none.
        num_departures: The slot table's, when this was planned: while it is the same, all of these
            requests run in these slots.
        is_someones_last: A decode of these computes the last token its request may compute.
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
