"""Waiting queue: the requests that wait, and the order in which they are to be admitted."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from math import floor, inf

from scheduler_svc.core.queue.fair_queue import FairQueue
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.policies import PrefixView
from scheduler_svc.core.queue.tenant_queue import Periods, QueuePlace, TenantQueue
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import Request
from tandem.errors import InternalError

AGED_AFTER = 10
"""Periods of `ageing_s` after which a waiting request goes ahead of all that waited less."""


def _those_taken(
    requests: Iterable[Request], can_take: Callable[[Request], bool] | None
) -> Iterable[Request]:
    """Return those of these requests that can be taken; all of them where that is None."""
    return requests if can_take is None else filter(can_take, requests)


class _Returned:
    """Requests of one priority that ran before."""

    __slots__ = ("by_number", "by_period")

    def __init__(self) -> None:
        self.by_number: KeyedHeap[float, Request] = KeyedHeap()
        self.by_period: KeyedHeap[float, int] = KeyedHeap()


class WaitingQueue:
    """
    Waiting requests in the order of admission.

    1. *Aged* requests, which have waited `AGED_AFTER * ageing_s` or longer, in order of arrival.
    2. All others by level, lower first. A request's level is its priority, less one for each
       boundary between two periods of `ageing_s` it has waited across. (Time is cut into the same
       periods for all, so levels keep their order as time passes and nothing is ever sorted again.)
    3. Within a level, requests that ran before, in order of arrival. They stand ahead of all of
       their own priority that never ran, at whatever level those are.
    4. Then requests that never ran, in the order of the policy.

    Only waiting counts, not the time a request ran in between.

    **Tenants take turns.** This is the order of each tenant's requests. Where requests of several
    tenants wait that never ran, `FairQueue` says whose is next: on equal levels that of the tenant
    that was served the fewest tokens by its weight. Against other tenants waiting counts from the
    tenant's latest turn on only, for levels and for being aged; requests that ran before have had
    their turn and stand ahead as above.

    **No request starves.** `candidates` stops at an aged request that is not admitted. So from the
    moment a request is aged, only requests that arrived before it are admitted ahead of it: their
    number is finite and never grows again. Each of these is admitted at the latest when nothing
    else runs, since submission refuses a request that does not fit alone, and each runs at most
    `max_model_len` steps in which it computes. A request with n earlier arrivals in the queue is
    thus admitted after at most ``10 * ageing_s`` plus the time that those n and the ones then
    running take to end, whatever arrives later, under every policy and priority. A preempted
    request keeps the time it had waited, so this holds for each of its admissions. Beside other
    tenants this holds for the oldest request of each tenant, from the tenant's latest turn on, so
    one with n earlier ones of its own tenant is admitted after n + 1 such times at the latest.

    Adding and removing take O(log n), the first candidate too under fcfs, lof and random.

    Attributes:
        num_fresh: Number of requests that never ran.
        num_fresh_tokens: Sum of `Request.terms.queued_tokens` of all requests that never ran.
    """

    __slots__ = (
        "_fresh",
        "_options",
        "_periods",
        "_places",
        "_returned",
        "_returned_aged",
        "_returned_since",
        "_start_by",
        "num_fresh",
        "num_fresh_tokens",
    )

    def __init__(self, options: CoreOptions) -> None:
        self._options = options
        self._places: dict[int, QueuePlace] = {}
        self._fresh = FairQueue(options)
        """Requests that never ran."""
        self._periods = Periods()
        """Periods of all requests that never ran."""
        self._start_by: KeyedHeap[float, Request] = KeyedHeap()
        """Requests that never ran and should run by some time."""
        self._returned: dict[int, _Returned] = {}
        """Requests that ran before, by priority."""
        self._returned_since: KeyedHeap[float, Request] = KeyedHeap()
        """Requests that ran before and are not in `_returned_aged`, by `since_s`."""
        self._returned_aged: KeyedHeap[float, Request] = KeyedHeap()
        """Aged requests that ran before, in order of arrival; these are in `_returned` too."""
        self.num_fresh = 0
        self.num_fresh_tokens = 0

    def add(self, request: Request, now: float) -> None:
        """Add a request that never ran and arrived after all others that never ran."""
        place = self._place(request, now, ran=False)
        self._fresh.add(place)
        self._periods.add(request.new.priority, place.period)
        if request.new.start_by_s is not None:
            self._start_by.push(request.new.start_by_s, request.number, request)
        self.num_fresh += 1
        self.num_fresh_tokens += request.terms.queued_tokens

    def put_back(self, request: Request, now: float) -> None:
        """Add a request that ran before."""
        place = self._place(request, now, ran=True)
        returned = self._returned.setdefault(request.new.priority, _Returned())
        returned.by_number.push(request.number, request.number, request)
        returned.by_period.push(place.period, request.number, place.period)
        self._returned_since.push(place.since_s, request.number, request)

    def take(self, request: Request, now: float) -> None:
        """Remove a request that is admitted, and note how long it has waited in all."""
        place = self._places[request.number]
        since_s = place.since_s
        request.end_wait(now - since_s, was_aged=since_s <= self._aged_before_s(now))
        if place.ran:
            self.discard(request)
            return
        del self._places[request.number]
        self._fresh.take(place, now)
        self._forget_fresh(place)

    def discard(self, request: Request) -> None:
        """Remove a request if it waits."""
        place = self._places.pop(request.number, None)
        if place is None:
            return
        if place.ran:
            self._discard_returned(request)
        else:
            self._fresh.discard(place)
            self._forget_fresh(place)

    def settle(self, request: Request) -> None:
        """Note that a request has ended with all its outputs, for its tenant's later turns."""
        self._fresh.settle(request)

    def fresh_of(self, tenant: str) -> TenantQueue | None:
        """Return a tenant's requests that never ran; None where none waits."""
        return self._fresh.queue_of(tenant)

    def longest_of_others(self, tenant: str) -> TenantQueue | None:
        """Return the longest queue of another tenant, by weight; None where no other waits."""
        return self._fresh.longest_of_others(tenant)

    def overdue(self, now: float) -> Request | None:
        """Return a request that never ran and should have by now; None where there is none."""
        return self._start_by.peek_due(now)

    def may_wait(self, request: Request) -> None:
        """Let a request that is overdue wait for as long as it must."""
        self._start_by.discard(request.number)

    @property
    def num_tenants(self) -> int:
        """Number of tenants with waiting requests that never ran."""
        return len(self._fresh)

    @property
    def next_overdue_s(self) -> float | None:
        """Earliest time by which a waiting request should have run; None without one."""
        top = self._start_by.peek()
        return None if top is None else top[0]

    def candidates(
        self,
        now: float,
        view: PrefixView | None,
        can_take: Callable[[Request], bool] | None = None,
    ) -> Iterator[Request]:
        """
        Yield the requests that may be admitted, next one first.

        The caller takes the request just yielded, goes on without taking it (it waits for something
        of its own, such as a prefix that is being written), or stops: a request that lacks blocks
        ends admission under every policy, since requests that overtake it would use up the blocks
        it waits for. The iterator stops by itself at an aged request that is not taken; before it
        does, it yields the choice that this one waits for, if there is one.

        Args:
            now: Present time, in seconds.
            view: The prefix cache; None where there is none, and then lpm and dfs-weight are fcfs.
            can_take: Says whether the caller could ever take a request; others are left out. None
                where it can take all.
        """
        for request in _those_taken(self._aged(now), can_take):
            yield request
            if request.number in self._places:
                yield from _those_taken(self._awaited_by(request), can_take)
                return
        yield from _those_taken(self._not_aged(now, view), can_take)

    def _awaited_by(self, request: Request) -> list[Request]:
        """
        Return the choice of the same request that an aged one waits for, since it is to have their
        prompt scored, if it waits here too. It need not be aged: before it was preempted it ran,
        while the aged one waited.
        """
        return [
            one
            for one in request.siblings
            if one is not request and one.needs_scores and one.number in self._places
        ]

    def in_order(self, now: float, view: PrefixView | None) -> Iterator[Request]:
        """Yield all waiting requests, next one first; O(n log n) at most."""
        listed: set[int] = set()
        for request in self._aged(now):
            listed.add(request.number)
            yield request
        for request in self._not_aged(now, view, lists_all=True):
            if request.number not in listed:
                yield request

    def best_priority(self) -> int | None:
        """Return the best priority of any waiting request; None when none waits."""
        return min((*self._returned, *self._periods.priorities()), default=None)

    def since_s(self, request: Request) -> float:
        """Return the time at which a waiting request would have come had it waited in one go."""
        return self._places[request.number].since_s

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._places

    def __iter__(self) -> Iterator[Request]:
        """Return an iterator over all waiting requests, in no order."""
        return iter([place.request for place in self._places.values()])

    def check_integrity(self, charged: Collection[Request] | None = None) -> None:
        """
        Compare all indexes.

        Args:
            charged: Live requests that were admitted once; None to leave them out.

        Raises:
            InternalError: Two of them differ.
        """
        for heap in (self._returned_since, self._returned_aged, self._start_by):
            heap.check_integrity()
        places = self._places
        ran = {number for number, place in places.items() if place.ran}
        fresh = [place for place in places.values() if not place.ran]
        self._fresh.check_integrity(charged)
        self._periods.check_integrity(fresh)
        in_turn = [request for _, request in self._fresh.in_turn(-inf, None, len(self))]
        if sorted(one.number for one in in_turn) != sorted(place.request.number for place in fresh):
            raise InternalError("the queue's indexes of requests that never ran differ")
        by_number = [request.number for one in self._returned.values() for request in one.by_number]
        by_age = [
            request.number
            for heap in (self._returned_since, self._returned_aged)
            for request in heap
        ]
        if not (sorted(by_number) == sorted(by_age) == sorted(ran)):
            raise InternalError("the queue's indexes of requests that ran before differ")
        by_period = Counter(period for one in self._returned.values() for period in one.by_period)
        if by_period != Counter(places[number].period for number in ran):
            raise InternalError("the queue's periods of requests that ran before differ")
        due = {one.request.number for one in fresh if one.request.new.start_by_s is not None}
        if not due >= {request.number for request in self._start_by}:
            raise InternalError("a request should run by some time that does not wait")
        tokens = sum(place.request.terms.queued_tokens for place in fresh)
        if (len(fresh), tokens) != (self.num_fresh, self.num_fresh_tokens):
            raise InternalError("the count of queued requests or tokens is wrong")

    def _place(self, request: Request, now: float, *, ran: bool) -> QueuePlace:
        since_s = now - request.times.waited_s
        period = floor(since_s / self._options.ageing_s)
        place = QueuePlace(request, since_s, period, ran)
        self._places[request.number] = place
        return place

    def _forget_fresh(self, place: QueuePlace) -> None:
        self._periods.remove(place.request.new.priority, place.period)
        self._start_by.discard(place.request.number)
        self.num_fresh -= 1
        self.num_fresh_tokens -= place.request.terms.queued_tokens

    def _discard_returned(self, request: Request) -> None:
        returned = self._returned[request.new.priority]
        returned.by_number.discard(request.number)
        returned.by_period.discard(request.number)
        if not returned.by_number:
            del self._returned[request.new.priority]
        self._returned_since.discard(request.number)
        self._returned_aged.discard(request.number)

    def _aged_before_s(self, now: float) -> float:
        return now - AGED_AFTER * self._options.ageing_s

    def _aged(self, now: float) -> Iterator[Request]:
        """Yield the aged requests in order of arrival."""
        before_s = self._aged_before_s(now)
        while (top := self._returned_since.peek()) is not None and top[0] <= before_s:
            request = top[1]
            self._returned_since.discard(request.number)
            self._returned_aged.push(request.number, request.number, request)
        fresh = self._fresh.aged(before_s)
        return heapq.merge(self._returned_aged, fresh, key=lambda request: request.number)

    def _not_aged(
        self, now: float, view: PrefixView | None, *, lists_all: bool = False
    ) -> Iterator[Request]:
        before_s, num_waiting = self._aged_before_s(now), len(self)
        returned = deque(sorted((self._returned_level(one), one) for one in self._returned))
        fresh = self._fresh.in_turn(before_s, view, num_waiting, lists_all=lists_all)
        for level, request in fresh:
            while returned and returned[0][0] <= level:
                yield from self._returned_of(returned.popleft()[1], before_s)
            yield request
        for _, priority in returned:
            yield from self._returned_of(priority, before_s)

    def _returned_level(self, priority: int) -> int:
        """Return the best level of all waiting requests with this priority."""
        first = self._returned[priority].by_period.peek()
        assert first is not None
        fresh = self._periods.first(priority)
        period = first[1] if fresh is None else min(first[1], fresh)
        return priority + period

    def _returned_of(self, priority: int, before_s: float) -> Iterator[Request]:
        for request in self._returned[priority].by_number:
            if self._places[request.number].since_s > before_s:
                yield request
