"""Deaths of executors and the requests that each counts against, worked out without the core."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from scheduler_svc.core.request.request import RequestState
from tandem.link.batch import Batch

NUM_PROGRESS = 8
"""Tokens past a step that died which show that a request was not the cause."""


class Deaths:
    """
    Deaths of executors, to an observer that sees the requests of each step.

    Attributes:
        kills_at: By handle, the position that kills when it is computed.
        in_step: Of each death, the handles in the step that was running.
        died_alone: By handle, its outputs at each of its deaths alone, and with those in flight.
    """

    def __init__(self) -> None:
        self.kills_at: dict[int, int] = {}
        self.in_step: list[frozenset[int]] = []
        self.forgiven_at: dict[int, int] = defaultdict(int)
        """By handle, the number of outputs at which its deaths are forgiven at the latest."""
        self.died_alone: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def is_deadly(self, core, batch: Batch) -> bool:
        """Return True when an executor dies of a batch that was just planned."""
        columns = zip(
            core._replica.slots.admitted.handle[batch.row_slot].tolist(),
            batch.row_start.tolist(),
            batch.row_num_tokens.tolist(),
            strict=True,
        )
        return any(
            start <= self.kills_at.get(handle, -1) < start + count
            for handle, start, count in columns
        )

    def note(self, core, died_in: int | None, owners: dict[tuple[int, int], int]) -> None:
        """Note that an executor is about to be lost in this step in flight."""
        in_flight = core._replica.steps.in_flight
        if died_in is None or died_in >= len(in_flight):
            return
        rows = in_flight[died_in]
        keys = zip(rows.slot.tolist(), rows.generation.tolist(), strict=True)
        handles = [owners[key] for key in keys]
        live = frozenset(handle for handle in handles if core.find(handle) is not None)
        self.in_step.append(live)
        for handle in live:
            num_outputs = len(core.outputs(handle))
            bound = num_outputs + max(NUM_PROGRESS, died_in + 1)
            self.forgiven_at[handle] = max(self.forgiven_at[handle], bound)
        if len(live) == len(handles) == 1:  # A request that has ended may be what it died of.
            (handle,) = live
            num_outputs = len(core.outputs(handle))
            self.died_alone[handle].append((num_outputs, num_outputs + died_in + 1))

    def check_forgiven(self, core) -> None:
        """Check that no running request that got on since its latest death has any against it."""
        for mark in core._cell.suspects.marks():
            handle = mark.request.new.handle
            if mark.deaths and mark.request.state is RequestState.DECODE:
                num_outputs = len(core.outputs(handle))
                assert num_outputs <= self.forgiven_at[handle], "who got on is not forgiven"

    def may_be_poison(self, handle: int) -> bool:
        """Return True when a request died alone twice without getting on in between."""
        deaths = self.died_alone[handle]
        return any(
            after <= max(before + NUM_PROGRESS, end)
            for (before, end), (after, _) in pairwise(deaths)
        )
