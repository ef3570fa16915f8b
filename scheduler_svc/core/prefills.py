"""Chunks of prompts: how much of whose prompt a step computes."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.draft import Draft
from scheduler_svc.core.request import RequestState
from tandem.link.batch import ROW_SAMPLES


def continue_prefills(draft: Draft) -> None:
    """Go on with prompts begun in earlier steps, oldest request first."""
    slots = draft.state.slots
    if slots.num_running == np.count_nonzero(slots.decoding):
        return
    started = np.flatnonzero(slots.running & ~slots.decoding)
    for slot in started[np.argsort(slots.number[started])].tolist():
        if not draft.budget:
            return
        add_chunk(draft, slot)


def add_chunk(draft: Draft, slot: int) -> None:
    """
    Compute as much of a slot's admitted tokens as the budget allows; its blocks are held since
    admission.
    """
    slots = draft.state.slots
    left = int(slots.admitted[slot] - slots.planned[slot])
    chunk = min(left, draft.budget)
    is_last = chunk == left
    draft.prefills.append((slot, chunk, int(ROW_SAMPLES) if is_last else 0))
    draft.budget -= chunk
    if is_last:
        slots.decoding[slot] = True
        slots.request_of(slot).move(RequestState.DECODE)
