"""Telling waiting requests their place, as often as is worth it."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.publisher import Publisher

INTERVAL_S = 2.0
"""How often waiting requests learn their place."""
FIRST_S = 0.1
"""How soon a new one does."""
REST = 50
"""Telling places waits at least this many times as long as it took the last time."""


class QueuePositions:
    """Owned by the loop."""

    def __init__(self, publisher: Publisher, clock: Callable[[], float]) -> None:
        """
        Args:
            publisher: Takes the places.
            clock: Seconds, to measure what telling costs.
        """
        self._publisher = publisher
        self._clock = clock
        self._num_accepted_seen = 0
        self._due_s = 0.0
        self._rest_s = 0.0

    def tell(self, core: Scheduler, num_accepted: int, now: float) -> None:
        """Tell everybody who waits, if it is time; `num_accepted` requests came so far."""
        if num_accepted != self._num_accepted_seen:
            self._num_accepted_seen = num_accepted
            self._due_s = min(self._due_s, max(now + FIRST_S, self._rest_s))
        if now < self._due_s:
            return
        began_s = self._clock()
        for position, handle in enumerate(core.waiting_handles()):
            self._publisher.add_progress(handle, ProgressKind.QUEUED, position)
        self._due_s = now + INTERVAL_S
        # A long queue takes milliseconds, however often somebody new arrives.
        self._rest_s = now + REST * (self._clock() - began_s)
