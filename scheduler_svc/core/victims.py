"""Who gives up its blocks when there are not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.slots import SlotTable

VictimPolicy: TypeAlias = Callable[[SlotTable, NDArray[np.intp]], int]
"""
Chooses one of the running slots given, shape ``[N]``, N >= 1, by what is known of them, never by
what is in flight.
"""


def fewest_generated(slots: SlotTable, candidates: NDArray[np.intp]) -> int:
    """
    The slot with the fewest outputs; among equals the longest prompt, then the latest arrival.
    """
    generated = slots.known[candidates] - slots.prompt_len[candidates]
    order = np.lexsort((-slots.number[candidates], -slots.prompt_len[candidates], generated))
    return int(candidates[order[0]])
