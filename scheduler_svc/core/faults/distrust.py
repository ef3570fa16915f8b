"""
Recovery from wrong KV, for the request that computed it and those that share it.

A row error says that a row's logits were not numbers, but not which request's KV made them so. KV
that the row wrote is dropped from the prefix cache, and requests that share it compute their own.
A request that itself shared KV of others is tried once more with only its own KV before it fails.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from scheduler_svc.core.kv_cache.prefix_cache import writer_key
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.state.replica import Replica


def distrust(replica: Replica, request: Request, also: AbstractSet[int] = frozenset()) -> None:
    """
    Drop from the prefix cache the KV computed by a request with a row error, by the requests that
    share it and by the writers `also`; those that share it start over with only their own KV.
    """
    culprit = writer_key(replica.slots.replica, *request.place.key)
    sharers = [other for other in replica.cell.requests if culprit in other.prefix.writers]
    # Sharers of what it wrote were admitted to the same executor last.
    keys = {writer_key(replica.slots.replica, *sharer.place.key) for sharer in sharers}
    replica.kv.prefix_cache.forget_written_by({culprit, *keys, *also})
    _index_nothing_of(replica, request)
    for sharer in sharers:
        _start_over(replica, sharer)


def retry_alone(replica: Replica, request: Request) -> None:
    """
    Start over a request that shared KV of others and got a row error, since the shared KV may have
    been wrong.
    """
    distrust(replica, request, request.prefix.writers)
    _start_over(replica, request)


def _index_nothing_of(replica: Replica, request: Request) -> None:
    slot = request.place.key[0]
    if request.place.slot is not None or replica.slots.left_by(slot) is request:
        replica.kv.prefix_cache.distrust(slot)


def _start_over(replica: Replica, request: Request) -> None:
    """Have a request compute all its KV itself, from its first token on."""
    request.prefix.share_nothing()
    replica.kv.host.discard(request.number)
    if request.state is RequestState.WAITING:
        return
    _index_nothing_of(replica, request)
    replica.restart(request, "shared KV was wrong")
