"""
Routing: which of several executors a waiting request is admitted to.

Requests wait in one queue and belong to no executor until one admits them, so that none idles
beside a queue. Each executor's plan asks here whether a request had better be left to another, and
until when:

    the request prefers another (`routing`)     that has room       until `PREFERENCE_S`, as it may
                                                                    be slow to plan its next step
                                                is full             as long as computing here what
                                                                    is there would take, up to
                                                                    `MAX_AFFINITY_S`
    load_balanced                               another has room    until `PREFERENCE_S`
                                                and less to do

**No request starves, and no executor idles beside a queue.** These times count from when a request
began to wait, and none is longer than `MAX_AFFINITY_S`. From then on, and once it is aged if that
is earlier, a request is welcome to every executor that can hold it. So the bound on waiting of
`queue.WaitingQueue` holds as for one executor, with the requests that run on any one executor that
can hold it; and an executor with room has nothing to do only while all that it could compute came
less than `MAX_AFFINITY_S` ago and is left to others. `Router.next_due_s` says when that ends, so
that no executor sleeps longer.

Source: SGLang's and Dynamo's cache-aware routers weigh overlap against load; unlike there, nothing
is sent ahead of time, and the true prefix indexes are asked how much a preference is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from scheduler_svc.core.queue.queue import AGED_AFTER
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.replica import Replica

PREFERENCE_S = 0.05
"""Longest time in seconds for which a request is left to an executor that could admit it."""
MAX_AFFINITY_S = 0.5
"""Longest time in seconds for which a request is left to an executor that is full."""
MAX_LEFT = 32
"""Most requests that one plan leaves to other executors."""


def welcome(replica: Replica, now: float) -> Iterator[Request]:
    """Return the waiting requests that an executor should admit, next one first."""
    candidates = replica.cell.queue.candidates(now, replica.kv.prefixes, taken_by(replica))
    return _welcome(replica, candidates, now) if replica.cell.has_others() else candidates


def taken_by(replica: Replica) -> Callable[[Request], bool] | None:
    """
    Return a predicate on requests that could ever run on an executor, and that no quarantine keeps
    from it; None where all can.
    """
    if replica.cell.suspects.has_marks:
        return partial(_may_run, replica)
    return replica.can_ever_take if replica.cell.has_others() else None


def _may_run(replica: Replica, request: Request) -> bool:
    is_barred = replica.cell.suspects.bars(replica.slots.replica, request)
    return not is_barred and replica.can_ever_take(request)


def _welcome(replica: Replica, candidates: Iterator[Request], now: float) -> Iterator[Request]:
    left = _Left(replica, now)
    for request in candidates:
        if not left.try_leave(request):
            yield request
        elif left.is_enough:
            return


class _Left:
    """Requests that one plan leaves to other executors, which count as work there."""

    __slots__ = ("_cell", "_longest_s", "_now", "_num_left", "_replica", "_tokens")

    def __init__(self, replica: Replica, now: float) -> None:
        self._replica = replica
        self._cell = replica.cell
        self._now = now
        self._longest_s = min(MAX_AFFINITY_S, AGED_AFTER * self._cell.options.ageing_s)
        self._num_left = Counter[int]()
        self._tokens = Counter[int]()

    @property
    def is_enough(self) -> bool:
        """True once so many are left that those behind them are not looked at."""
        return self._num_left.total() >= MAX_LEFT

    def try_leave(self, request: Request) -> bool:
        """Leave a request to another executor, for now, if it had better go there."""
        since_s = self._cell.queue.since_s(request)
        if self._now >= since_s + self._longest_s:
            return False
        to, wait_s = self._where(request)
        until_s = since_s + min(wait_s, self._longest_s)
        if to is None or self._now >= until_s:
            return False
        self._num_left[to] += 1
        self._tokens[to] += request.num_known
        self._cell.router.note_left(request, until_s)
        return True

    def _where(self, request: Request) -> tuple[int | None, float]:
        """Return the executor that a request had better go to, and how long that may take."""
        own, router = self._replica.slots.replica, self._cell.router
        preferred = router.preferred(request)
        if preferred is not None and self._cell.suspects.bars(preferred, request):
            preferred = None
        if preferred is not None and not router.has_preferences:
            # It ran there, or another of its choices does: that binds it while there is room.
            if preferred == own:
                return None, 0.0
            if self._cost(preferred, request) is not None:
                return preferred, PREFERENCE_S
        to, wait_s = None, 0.0
        if preferred is not None and preferred != own:
            to, wait_s = preferred, self._affinity_s(request, preferred)
        if router.has_preferences or wait_s > PREFERENCE_S:
            return to, wait_s
        best = self._cheapest(request)
        return (to, wait_s) if best in (None, own) else (best, PREFERENCE_S)

    def _affinity_s(self, request: Request, preferred: int) -> float:
        """Return how long a request had better wait for the executor that it prefers."""
        replica, router = self._replica, self._cell.router
        num_saved = self._cell.holder(preferred).ready_len(request) - replica.ready_len(request)
        wait_s = max(num_saved, 0) * replica.pace.prefill_s
        if not router.has_preferences:
            # Where there is room, what is saved is part of the cost already.
            return wait_s if self._cost(preferred, request) is None else 0.0
        if router.is_round_robin and request.place.replica is None:
            return MAX_AFFINITY_S
        has_room = self._cost(preferred, request) is not None
        return max(wait_s, PREFERENCE_S) if has_room else wait_s

    def _cheapest(self, request: Request) -> int | None:
        """
        Return the executor with the least to do before a request's first token, of equal ones the
        one that was chosen least recently; None where none could admit it.
        """
        bound_at = self._cell.router.bound_at
        costs = {number: self._cost(number, request) for number in self._cell.holder_numbers()}
        found = {number: cost for number, cost in costs.items() if cost is not None}
        return min(found, key=lambda one: (found[one], bound_at(one), one), default=None)

    def _cost(self, number: int, request: Request) -> float | None:
        return self._cell.holder(number).cost(
            request, num_more=self._num_left[number], more_tokens=self._tokens[number]
        )
