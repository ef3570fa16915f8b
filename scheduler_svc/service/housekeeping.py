"""Times of the loop's housekeeping, which turns for results of steps leave to a later turn."""

from __future__ import annotations

from math import inf

from scheduler_svc.service.drain import Drain
from scheduler_svc.service.executors.operations import ExecutorOperations
from scheduler_svc.service.operate.queries import Queries
from scheduler_svc.service.publisher import RETRY_S
from scheduler_svc.service.service_state import ServiceState

LOOK_INTERVAL_S = 0.01
"""
Seconds for which turns for results of steps alone, which are frequent, look neither at executors
nor at what depends on the time.
"""


class Housekeeping:
    """
    Times at which turns do the housekeeping: what depends on the time, on messages, and on
    executors that come and go. Owned by the core loop.

    Most turns are for results of steps alone. They leave the housekeeping, which takes about as
    long as planning, to the first turn that comes `LOOK_INTERVAL_S` or more after it was done. None
    leaves it while something waits that a result may end: a drain of the service or of an executor,
    a query without its answer, or the time in which the service is not ready; nor does the turn in
    which the last request ends.

    Attributes:
        due_s: Time by which what waits needs a turn; infinity where nothing waits.
    """

    __slots__ = ("_drain", "_operations", "_queries", "_rests_until_s", "_state", "due_s")

    def __init__(
        self, state: ServiceState, drain: Drain, queries: Queries, operations: ExecutorOperations
    ) -> None:
        self._state = state
        self._drain = drain
        self._queries = queries
        self._operations = operations
        self._rests_until_s = 0.0
        self.due_s = inf

    def is_due(self, now: float, *, has_news: bool) -> bool:
        """
        Return True if this turn must do the housekeeping.

        Args:
            now: The time.
            has_news: True where the turn took more than results of steps.
        """
        return has_news or now >= self._rests_until_s or not self._state.num_requests

    def note_done(self, now: float) -> None:
        """Note that a turn has done the housekeeping, and look at what still waits."""
        self.due_s = self._waits_until_s(now)
        may_rest = self.due_s == inf and self._state.availability.ready
        self._rests_until_s = now + LOOK_INTERVAL_S * may_rest

    def _waits_until_s(self, now: float) -> float:
        """Return the time by which a drain, a query or an executor's drain needs a turn."""
        until_s = inf
        if (drained_s := self._drain.due_s) is not None:
            until_s = max(drained_s, now + RETRY_S)
        if (answer_s := self._queries.next_answer_s) is not None:
            until_s = min(until_s, answer_s)
        if (given_back_s := self._operations.next_due_s) is not None:
            until_s = min(until_s, max(given_back_s, now + RETRY_S))
        return until_s
