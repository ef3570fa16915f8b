"""Who gives up its blocks when there are not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.options import VictimRule
from scheduler_svc.core.slots.slots import SlotTable

VictimPolicy: TypeAlias = Callable[[SlotTable, NDArray[np.intp]], int]
"""
Chooses one of the running slots given, shape ``[N]``, N >= 1, by what is known of them, never by
what is in flight.
"""


def fewest_generated(slots: SlotTable, candidates: NDArray[np.intp]) -> int:
    """
    The slot with the fewest outputs; among equals the longest prompt, then the latest arrival.

    Source: SGLang.
    """
    generated = slots.known[candidates] - slots.prompt_len[candidates]
    order = np.lexsort((-slots.number[candidates], -slots.prompt_len[candidates], generated))
    return int(candidates[order[0]])


def last_admitted(slots: SlotTable, candidates: NDArray[np.intp]) -> int:
    """
    The slot that was occupied last.

    Source: vLLM under fcfs, where the order of admission and that of arrival are one.
    """
    return int(candidates[np.argmax(slots.turn[candidates])])


def least_urgent(slots: SlotTable, candidates: NDArray[np.intp]) -> NDArray[np.intp]:
    """
    Those of the slots given, shape ``[N]``, whose requests have the worst priority, shape ``[M]``,
    M >= 1; the rule then chooses among these.

    Who was admitted for having waited long counts as the most urgent: else it could be admitted and
    retracted in turn for as long as better priorities arrive.

    Source: vLLM under priority scheduling, without its order of arrival, which is the rule's to
    say. Takes Python time per row, at a retraction only.
    """
    requests = [slots.request_of(slot) for slot in candidates.tolist()]
    most_urgent = np.iinfo(np.int64).min
    priority = np.array(
        [most_urgent if request.was_aged else request.new.priority for request in requests],
        np.int64,
    )
    chosen: NDArray[np.intp] = candidates[priority == priority.max()]
    return chosen


VICTIM_POLICIES: dict[VictimRule, VictimPolicy] = {
    VictimRule.FEWEST_GENERATED: fewest_generated,
    VictimRule.LAST_ADMITTED: last_admitted,
}
"""Paused rows are chosen by when they were paused, see `pausing`."""
