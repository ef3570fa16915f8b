"""
One step's plan: who computes how many tokens next.

    release what ended
    every decode that has something to compute   one token each; a block where the last is full;
                                                 preempt until there are enough blocks
    running prefills, oldest first               as many tokens as the budget leaves
    the queue, head first                        while slots, budget, threshold and blocks allow
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.admitting import admit
from scheduler_svc.core.draft import Draft
from scheduler_svc.core.growth import grow
from scheduler_svc.core.prefills import continue_prefills
from scheduler_svc.core.state import CoreState
from tandem.link.batch import Batch


def plan(state: CoreState, now: float) -> Batch | None:
    """Plan the next batch; None when there is nothing to send."""
    draft = Draft(state)
    draft.release_ended()
    _plan_decodes(draft)
    if draft.budget:
        continue_prefills(draft)
    # Who was preempted stands first in the queue, also while it drains.
    if state.queue and draft.budget and not draft.num_preempted and not state.draining:
        admit(draft, now)
    return draft.batch()


def _plan_decodes(draft: Draft) -> None:
    slots = draft.state.slots
    ready = (slots.decoding & (slots.planned < slots.stop_len - 1)).nonzero()[0]
    if not len(ready):
        return
    if len(ready) > draft.budget:
        ready = _least_served(draft, ready)
    ready = grow(draft, ready)
    draft.decodes = ready
    draft.budget -= len(ready)


def _least_served(draft: Draft, ready: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those who waited longest for a token, oldest requests first, as many as the budget allows."""
    slots = draft.state.slots
    order = np.lexsort((slots.number[ready], slots.served[ready]))
    chosen: NDArray[np.intp] = ready[order[: draft.budget]]
    slots.served[chosen] = slots.served.max() + 1 + np.arange(len(chosen))
    return chosen
