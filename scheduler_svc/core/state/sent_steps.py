"""Steps that an executor was sent: those whose results are yet to come, and how many there were."""

from __future__ import annotations

from collections import Counter, deque

from scheduler_svc.core.observe.stats import Counters
from scheduler_svc.core.slots.planned_rows import PlannedRows


class SentSteps:
    """
    Batches and commands that one executor was sent.

    Attributes:
        in_flight: Those without an applied result, oldest first.
        most_in_flight: Most of them that there may ever be; `lookahead` says how many now.
        num_done: Number of those with results so far, also of executors in its place before.
        num_decode: Number of steps planned with decodes so far.
    """

    __slots__ = ("_counters", "in_flight", "most_in_flight", "num_decode", "num_done")

    def __init__(self, counters: Counters, most_in_flight: int) -> None:
        self._counters = counters
        self.in_flight: deque[PlannedRows] = deque()
        self.most_in_flight = most_in_flight
        self.num_done = self.num_decode = 0

    def note_sent(self, rows: PlannedRows) -> None:
        """Note a batch or command as in flight, behind all others."""
        self.in_flight.append(rows)

    def note_decodes(self) -> None:
        """Note that a step is planned with decodes."""
        self.num_decode += 1
        self._counters.decode_steps += 1

    def note_result(self) -> None:
        """Note that the oldest batch or command is in flight no longer: its result is applied."""
        self.in_flight.popleft()
        self._counters.compute.steps += 1
        self.num_done += 1

    def note_lost(self) -> None:
        """Note that no result will come of what is in flight."""
        self.in_flight.clear()

    def tokens_by_key(self) -> Counter[tuple[int, int]]:
        """Return the number of tokens in flight of each slot and generation."""
        counts = Counter[tuple[int, int]]()
        for rows in self.in_flight:
            for key, num_tokens in rows.tokens_by_key():
                counts[key] += num_tokens
        return counts
