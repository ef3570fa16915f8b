"""Victim policies: they choose the request to preempt when blocks are short."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.options import VictimRule
from scheduler_svc.core.slots.slots import SlotTable

VictimPolicy: TypeAlias = Callable[[SlotTable, NDArray[np.intp]], int]
"""
Choice of one of the given running slots, shape ``[N]``, N >= 1, by their known tokens, never by
tokens in flight.
"""


def fewest_generated(slots: SlotTable, candidates: NDArray[np.intp]) -> int:
    """
    Return the slot with the fewest outputs; among equals the longest prompt, then latest arrival.

    Source: SGLang.
    """
    generated = slots.tokens.known[candidates] - slots.admitted.prompt_len[candidates]
    order = np.lexsort(
        (-slots.admitted.number[candidates], -slots.admitted.prompt_len[candidates], generated)
    )
    return int(candidates[order[0]])


def last_admitted(slots: SlotTable, candidates: NDArray[np.intp]) -> int:
    """
    Return the slot that was occupied last.

    Source: vLLM under fcfs, where the order of admission and that of arrival are one.
    """
    return int(candidates[np.argmax(slots.admitted.turn[candidates])])


def least_urgent(slots: SlotTable, candidates: NDArray[np.intp]) -> NDArray[np.intp]:
    """
    Return those of the given slots, shape ``[N]``, that have requests of the worst priority, shape
    ``[M]``, M >= 1; the victim rule then chooses among these.

    A request that was admitted because it had waited long counts as the most urgent: otherwise it
    could be admitted and retracted in turn for as long as better priorities arrive.

    Source: vLLM under priority scheduling, without its order of arrival, which is up to the victim
    rule. Takes Python time per row, at a retraction only.
    """
    requests = [slots.request_of(slot) for slot in candidates.tolist()]
    most_urgent = np.iinfo(np.int64).min
    priority = np.array(
        [
            most_urgent if request.setbacks.was_aged else request.new.priority
            for request in requests
        ],
        np.int64,
    )
    chosen: NDArray[np.intp] = candidates[priority == priority.max()]
    return chosen


VICTIM_POLICIES: dict[VictimRule, VictimPolicy] = {
    VictimRule.FEWEST_GENERATED: fewest_generated,
    VictimRule.LAST_ADMITTED: last_admitted,
}
"""Policy of each victim rule; under `paused_budget` the last paused row goes, see `pausing`."""
