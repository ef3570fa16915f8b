"""Requests and tokens of a step in flight, for those that observe steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.slots.slots import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """
    Rows of one step.

    Attributes:
        handles: Handles of its requests, decodes first; without prompts that lost their slot to
            another request since the step was planned.
        num_decodes: Rows that compute one token, behind a request's latest.
        num_prefills: Rows that compute tokens of a prompt, or of outputs that are computed anew.
        prefill_tokens: Tokens of these.
    """

    handles: NDArray[np.int64]
    num_decodes: int
    num_prefills: int
    prefill_tokens: int

    @classmethod
    def of(cls, rows: PlannedRows, slots: SlotTable) -> StepRows | None:
        """Return the rows of a step in flight; None for one that computes nothing."""
        if not len(rows.slot):
            return None
        first = rows.num_decodes
        slot = rows.slot[first:]
        is_same = slots.generation[slot] == rows.generation[first:]
        handles: NDArray[np.int64] = slots.admitted.handle[slot[is_same]]
        if rows.decodes is not None:
            handles = np.concatenate([rows.decodes.handle, handles])
        return cls(
            handles=handles,
            num_decodes=first,
            num_prefills=len(slot),
            prefill_tokens=int(rows.num_tokens[first:].sum()),
        )
