"""
Routing: which of several executors a waiting request is admitted to.

Requests wait in one queue and belong to no executor until one admits them, so that none idles
beside a queue. Each executor's plan asks here whether a request had better be left for another:
one that has its prefix cached, or less to do. It is left only where the other could admit it at
once, and for at most `PREFERENCE_S`: the other may be slow to plan its next step.

Source: SGLang's and Dynamo's cache-aware routers weigh overlap against load; unlike there, nothing
is sent ahead of time, and the true prefix indexes are asked instead of a model of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.replica import Replica

PREFERENCE_S = 0.05
"""Longest time in seconds for which a request is left to the executor that it prefers."""
MAX_LEFT = 32
"""Most requests that one plan leaves to other executors."""


def welcome(replica: Replica, now: float) -> Iterator[Request]:
    """Yield the waiting requests that an executor should admit, next one first."""
    candidates = replica.cell.queue.candidates(now, replica.kv.prefixes, taken_by(replica))
    num_left = 0
    for request in candidates:
        if _is_welcome(replica, request, now):
            yield request
            continue
        num_left += 1
        if num_left == MAX_LEFT:
            return


def taken_by(replica: Replica) -> Callable[[Request], bool] | None:
    """Return a predicate on requests that could ever run on an executor; None where all can."""
    return replica.can_ever_take if replica.cell.has_others() else None


def _is_welcome(replica: Replica, request: Request, now: float) -> bool:
    """Return False where a waiting request should be left to another executor, for now."""
    cell = replica.cell
    if not cell.has_others() or now - cell.queue.since_s(request) > PREFERENCE_S:
        return True
    least = cell.least_cost(request, but=replica.slots.replica)
    if least is None:
        return True
    own = replica.cost(request)
    return own is not None and own <= least
