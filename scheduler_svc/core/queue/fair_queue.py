"""Turns of tenants: whose request goes next among those that never ran."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import floor, inf

from scheduler_svc.core.invariants import require
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.policies import PrefixView
from scheduler_svc.core.queue.tenant_queue import QueuePlace, TenantQueue
from scheduler_svc.core.queue.token_counters import TokenCounters
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import Request

_Rank = tuple[float, float, float]
"""Level, token counter and time of the latest turn, by which tenants are compared."""
_Stream = Iterator[tuple[float, Request]]


@dataclass(slots=True, eq=False)
class _Turn:
    """
    A tenant with requests that wait.

    Attributes:
        number: Number of the turn, never reused.
        tenant: The tenant.
        queue: Its requests.
        served_s: Time at which a request of it was admitted last, since it waits.
        rank: Its rank among the tenants.
        since_s: Time since which it has waited for its turn.
    """

    number: int
    tenant: str
    queue: TenantQueue
    served_s: float
    rank: _Rank
    since_s: float


class FairQueue:
    """
    Requests that never ran, whose tenants take turns.

    A tenant's requests keep the order of its `TenantQueue`. Between tenants, the best level goes
    first, and on one level the tenant that was served least by its weight (`TokenCounters`).
    Against other tenants a request has waited only since its tenant's latest turn: else a tenant's
    backlog would outrank all that others send later. A tenant that had no turn for so long
    that its oldest request is aged goes ahead of all that had one. Requests without a tenant count
    as one tenant's.

    While one tenant waits, its order is the order. Adding, removing and the first request take
    O(log n); after a request that is passed over all tenants are listed once.
    """

    __slots__ = ("_ageing_s", "_counters", "_next_number", "_policy", "_ranks", "_since", "_turns")

    def __init__(self, options: CoreOptions) -> None:
        self._ageing_s = options.ageing_s
        self._policy = options.schedule_policy
        self._turns: dict[str, _Turn] = {}
        """Tenants that wait, by name."""
        self._ranks: KeyedHeap[_Rank, _Turn] = KeyedHeap()
        self._since: KeyedHeap[float, _Turn] = KeyedHeap()
        """Tenants by the time since which they have waited for their turn."""
        self._counters = TokenCounters()
        self._next_number = 0

    def add(self, place: QueuePlace) -> None:
        """Add a request that arrived after all others here."""
        tenant = place.request.new.tenant
        turn = self._turns.get(tenant)
        if turn is None:
            queue = TenantQueue(self._policy)
            turn = _Turn(self._next_number, tenant, queue, -inf, (inf, inf, inf), inf)
            self._next_number += 1
            self._turns[tenant] = turn
            self._counters.start_waiting(tenant)
        turn.queue.add(place)
        self._rank(turn)
        if len(self._turns) == 2:
            self._rank_all()

    def take(self, place: QueuePlace, now: float) -> None:
        """Remove a request that is admitted, and charge its tenant."""
        self._counters.charge(place.request)
        self._turns[place.request.new.tenant].served_s = now
        self.discard(place)

    def discard(self, place: QueuePlace) -> None:
        """Remove a request that is here."""
        turn = self._turns[place.request.new.tenant]
        turn.queue.discard(place)
        if len(turn.queue):
            self._rank(turn)
            return
        del self._turns[turn.tenant]
        self._ranks.discard(turn.number)
        self._since.discard(turn.number)
        self._counters.stop_waiting(turn.tenant)
        if len(self._turns) == 1:
            self._rank_all()

    def settle(self, request: Request) -> None:
        """Note that a request ended, so that its tenant is charged its real output."""
        if self._counters.settle(request):
            self._rank(self._turns[request.new.tenant])

    def __len__(self) -> int:
        """Return the number of tenants that wait."""
        return len(self._turns)

    def queue_of(self, tenant: str) -> TenantQueue | None:
        """Return the waiting requests of a tenant; None where none waits."""
        turn = self._turns.get(tenant)
        return None if turn is None else turn.queue

    def longest_of_others(self, tenant: str) -> TenantQueue | None:
        """
        Return the queue of another tenant with the most requests by its weight, as its oldest one
        has it; None where no other tenant waits. O(number of tenants).
        """
        others = [turn.queue for name, turn in self._turns.items() if name != tenant]
        return max(others, key=_weighted_len, default=None)

    def aged(self, before_s: float) -> Iterator[Request]:
        """
        Yield, in order of arrival, the oldest request of each tenant that waits for its turn since
        `before_s`, and all that are as old of a tenant that waits alone. The one that was yielded
        last may be taken meanwhile; if it is not, nothing may be.
        """
        if len(self._turns) == 1:
            (turn,) = self._turns.values()
            yield from turn.queue.aged(before_s)
            return
        top = self._since.peek()
        if top is not None and top[0] <= before_s:
            due = [turn.queue.oldest.request for turn in self._since if turn.since_s <= before_s]
            yield from sorted(due, key=lambda request: request.number)

    def in_turn(
        self,
        before_s: float,
        view: PrefixView | None,
        num_waiting: int,
        *,
        lists_all: bool = False,
    ) -> _Stream:
        """
        Yield the requests, each with the level at which its tenant stands, next one first; those
        that `aged` yields too where a tenant does not wait alone. The one that was yielded last may
        be taken meanwhile. No more of a tenant come after an aged one that is not taken, so that
        none of its own passes it.

        Args:
            before_s: Time since which aged requests wait.
            view: The prefix cache; None where there is none.
            num_waiting: Requests in the whole queue.
            lists_all: None is taken, and all come.
        """
        if len(self._turns) == 1:
            (turn,) = self._turns.values()
            yield from turn.queue.not_aged(before_s, view, num_waiting)
            return
        streams: dict[int, _Stream] = {}
        while (top := self._ranks.peek()) is not None:
            turn = top[1]
            if turn.number not in streams:
                streams[turn.number] = _own_order(
                    turn.queue, before_s, view, num_waiting, lists_all=lists_all
                )
            level, request = next(streams[turn.number])
            yield max(level, turn.rank[0]), request
            if request.number in turn.queue:
                break
        for turn in self._turns.values():
            if turn.number not in streams:
                streams[turn.number] = _own_order(
                    turn.queue, before_s, view, num_waiting, lists_all=lists_all
                )
        yield from self._merged(streams)

    def check_integrity(self, charged: Collection[Request] | None) -> None:
        """
        Check each tenant's requests, and the ranks and token counters of the tenants.

        Args:
            charged: Live requests that were admitted once; None to leave them out.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        self._ranks.check_integrity()
        self._since.check_integrity()
        turns = sorted(self._turns.values(), key=lambda turn: turn.number)
        for heap in (self._ranks, self._since):
            listed = sorted(heap, key=lambda turn: turn.number)
            require(listed == turns, "tenants that wait have no turn, or others have one")
        for turn in turns:
            require(len(turn.queue) > 0, "a tenant without waiting requests has a turn")
            tenants = {place.request.new.tenant for place in turn.queue}
            require(tenants == {turn.tenant}, "a request is in the queue of another tenant")
            require(turn.rank == self._rank_of(turn), "the rank of a tenant is out of date")
            require(turn.since_s == _since_s(turn), "the turn of a tenant is out of date")
            turn.queue.check_integrity()
        self._counters.check_integrity(self._turns.keys(), charged)

    def _merged(self, streams: dict[int, _Stream]) -> _Stream:
        """Yield what is left of the tenants' requests, in turn."""
        heap = [(turn.rank, turn.number, turn) for turn in self._turns.values()]
        heapq.heapify(heap)
        later: dict[int, tuple[float, Request]] = {}
        while heap:
            rank, number, turn = heapq.heappop(heap)
            offer = later.pop(number, None) or next(streams[number], None)
            if offer is None:
                continue
            level = max(offer[0], turn.rank[0])
            if level > rank[0]:
                # Its next request stands behind the one passed over, perhaps behind others too.
                later[number] = offer
                heapq.heappush(heap, ((level, rank[1], rank[2]), number, turn))
                continue
            yield level, offer[1]
            if len(turn.queue):
                heapq.heappush(heap, (turn.rank, number, turn))

    def _rank_all(self) -> None:
        """Rank all tenants, which are two or one, as one does not wait alone or does again."""
        for turn in self._turns.values():
            self._rank(turn)

    def _rank(self, turn: _Turn) -> None:
        rank, since_s = self._rank_of(turn), _since_s(turn)
        if rank != turn.rank:
            turn.rank = rank
            self._ranks.discard(turn.number)
            self._ranks.push(rank, turn.number, turn)
        if since_s != turn.since_s:
            turn.since_s = since_s
            self._since.discard(turn.number)
            self._since.push(since_s, turn.number, turn)

    def _rank_of(self, turn: _Turn) -> _Rank:
        is_first = len(self._turns) == 1 or turn.served_s == -inf
        served_period = -inf if is_first else floor(turn.served_s / self._ageing_s)
        level = turn.queue.best_level(served_period)
        return level, self._counters.of(turn.tenant), turn.served_s


def _weighted_len(queue: TenantQueue) -> float:
    return len(queue) / queue.oldest.request.new.tenant_limits.weight


def _since_s(turn: _Turn) -> float:
    return max(turn.queue.oldest.since_s, turn.served_s)


def _own_order(
    queue: TenantQueue,
    before_s: float,
    view: PrefixView | None,
    num_waiting: int,
    *,
    lists_all: bool,
) -> _Stream:
    """
    Yield the requests of a tenant in its own order, aged ones ahead of all levels, up to an aged
    one that is not taken, or all of them.
    """
    for request in queue.aged(before_s):
        yield -inf, request
        if request.number in queue and not lists_all:
            return
    yield from queue.not_aged(before_s, view, num_waiting)
