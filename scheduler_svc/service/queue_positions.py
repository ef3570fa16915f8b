"""Reports to waiting requests of their position in the queue, at a bounded cost."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.publisher import Publisher

INTERVAL_S = 2.0
"""Seconds between two reports to all waiting requests."""
FIRST_S = 0.1
"""Seconds after which a new request gets its first report."""
REST = 50
"""Shortest pause before a report to new requests, as a multiple of the last report's duration."""


class QueuePositions:
    """Reporter of positions in the waiting queue. Owned by the loop."""

    def __init__(self, publisher: Publisher, clock: Callable[[], float]) -> None:
        """
        Args:
            publisher: Takes the positions.
            clock: Returns seconds; measures the time that a report takes.
        """
        self._publisher = publisher
        self._clock = clock
        self._num_accepted_seen = 0
        self._due_s = 0.0
        self._rest_s = 0.0

    def tell(self, core: Scheduler, num_accepted: int, now: float) -> None:
        """
        Report every waiting request's position, if a report is due.

        Args:
            core: Holds the waiting queue.
            num_accepted: Number of requests accepted so far; a new one makes a report due sooner.
            now: The time.
        """
        if num_accepted != self._num_accepted_seen:
            self._num_accepted_seen = num_accepted
            self._due_s = min(self._due_s, max(now + FIRST_S, self._rest_s))
        if now < self._due_s:
            return
        began_s = self._clock()
        for position, handle in enumerate(core.waiting_handles()):
            self._publisher.add_progress(handle, ProgressKind.QUEUED, position)
        self._due_s = now + INTERVAL_S
        # A long queue takes milliseconds, so new requests must not cause a report each.
        self._rest_s = now + REST * (self._clock() - began_s)
