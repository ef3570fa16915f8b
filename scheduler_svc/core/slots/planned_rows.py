"""Rows of a batch in flight, as the core remembers them until its result is applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.slots.decode_rows import DecodeRows
from tandem.link.batch import Int32Column, UInt32Column

SlotColumn: TypeAlias = NDArray[np.intp] | Int32Column
"""Slot numbers, as an index of numpy or as a column of a batch."""


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
        has_last_decode: True when a decode row computes the last token its request may compute.
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
    has_last_decode: bool

    @classmethod
    def of_decodes(cls, rows: DecodeRows, end: Int32Column, num_departures: int) -> PlannedRows:
        """Return the rows of a batch of decodes alone, which sample at `end`, shape ``[R]``."""
        return cls(
            slot=rows.row_slot,
            generation=rows.generation,
            num_tokens=rows.num_tokens,
            sampling_slot=rows.row_slot,
            sampling_generation=rows.generation,
            sampling_end=end,
            num_decodes=rows.num_rows,
            decodes=rows,
            num_departures=num_departures,
            has_last_decode=not rows.num_left,
        )

    @classmethod
    def of_rows(
        cls,
        decodes: DecodeRows | None,
        *,
        slot: Int32Column,
        generation: UInt32Column,
        num_tokens: Int32Column,
        end: Int32Column,
        samples: NDArray[np.bool_],
        num_departures: int,
    ) -> PlannedRows:
        """
        Return the rows of any batch, once they count as sent.

        Args:
            decodes: Decode rows, the first of the batch; None when there are none.
            slot: See the attributes.
            generation: See the attributes.
            num_tokens: See the attributes.
            end: Position behind the last token that each row computes, shape ``[R]``.
            samples: True for each row that samples, shape ``[R]``.
            num_departures: See the attributes.
        """
        return cls(
            slot=slot,
            generation=generation,
            num_tokens=num_tokens,
            sampling_slot=slot[samples],
            sampling_generation=generation[samples],
            sampling_end=end[samples],
            num_decodes=0 if decodes is None else decodes.num_rows,
            decodes=decodes,
            num_departures=num_departures,
            has_last_decode=decodes is not None and not decodes.num_left,
        )

    @classmethod
    def none(cls, num_departures: int) -> PlannedRows:
        """Return the rows of a command, which computes nothing."""
        no_slot, no_generation = np.empty(0, np.int32), np.empty(0, np.uint32)
        return cls(
            slot=no_slot,
            generation=no_generation,
            num_tokens=no_slot,
            sampling_slot=no_slot,
            sampling_generation=no_generation,
            sampling_end=no_slot,
            num_decodes=0,
            decodes=None,
            num_departures=num_departures,
            has_last_decode=False,
        )

    def tokens_by_key(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Return the (slot, generation) and the number of tokens of each row."""
        keys = zip(self.slot.tolist(), self.generation.tolist(), strict=True)
        return zip(keys, self.num_tokens.tolist(), strict=True)
