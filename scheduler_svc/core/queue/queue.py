"""Waiting queue: the requests that wait, and the order in which they are to be admitted."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.policies import Bucket, PrefixView, bucket_of
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import Request
from tandem.errors import InternalError

AGED_AFTER = 10
"""Periods of `ageing_s` after which a waiting request goes ahead of all that waited less."""


@dataclass(frozen=True, slots=True)
class _Place:
    """
    Place of a waiting request in the queue.

    Attributes:
        request: The request.
        since_s: Time at which it would have arrived had all its waiting been in one go up to now.
        period: Index of the period of `ageing_s` that this time is in.
        ran: True when it was admitted before.
    """

    request: Request
    since_s: float
    period: int
    ran: bool


class _Returned:
    """Requests of one priority that ran before."""

    __slots__ = ("by_number", "by_period")

    def __init__(self) -> None:
        self.by_number: KeyedHeap[Request] = KeyedHeap()
        self.by_period: KeyedHeap[int] = KeyedHeap()


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

    **No request starves.** `candidates` stops at an aged request that is not admitted. So from the
    moment a request is aged, only requests that arrived before it are admitted ahead of it: their
    number is finite and never grows again. Each of these is admitted at the latest when nothing
    else runs, since submission refuses a request that does not fit alone, and each runs at most
    `max_model_len` steps in which it computes. A request with n earlier arrivals in the queue is
    thus admitted after at most ``10 * ageing_s`` plus the time that those n and the ones then
    running take to end, whatever arrives later, under every policy and priority. A preempted
    request keeps the time it had waited, so this holds for each of its admissions.

    Adding and removing take O(log n), the first candidate too under fcfs, lof and random.

    Attributes:
        num_fresh_tokens: Sum of `Request.terms.queued_tokens` of all requests that never ran.
    """

    __slots__ = (
        "_fresh",
        "_fresh_periods",
        "_levels",
        "_options",
        "_places",
        "_returned",
        "_returned_aged",
        "_returned_since",
        "num_fresh_tokens",
    )

    def __init__(self, options: CoreOptions) -> None:
        self._options = options
        self._places: dict[int, _Place] = {}
        self._fresh: OrderedDict[int, Request] = OrderedDict()
        """Requests that never ran, in order of arrival."""
        self._levels: KeyedHeap[tuple[int, Bucket]] = KeyedHeap()
        """Requests that never ran, one bucket per level."""
        self._fresh_periods: dict[int, OrderedDict[int, int]] = {}
        """Number of requests that never ran, by priority and then by period, ascending."""
        self._returned: dict[int, _Returned] = {}
        """Requests that ran before, by priority."""
        self._returned_since: KeyedHeap[Request] = KeyedHeap()
        """Requests that ran before and are not in `_returned_aged`, by `since_s`."""
        self._returned_aged: KeyedHeap[Request] = KeyedHeap()
        """Aged requests that ran before, in order of arrival; these are in `_returned` too."""
        self.num_fresh_tokens = 0

    def add(self, request: Request, now: float) -> None:
        """Add a request that never ran and arrived after all others that never ran."""
        place = self._place(request, now, ran=False)
        self._fresh[request.number] = request
        level = request.new.priority + place.period
        found = self._levels.get(level)
        if found is None:
            found = level, bucket_of(self._options.schedule_policy)
            self._levels.push(level, level, found)
        found[1].add(request)
        periods = self._fresh_periods.setdefault(request.new.priority, OrderedDict())
        periods[place.period] = periods.get(place.period, 0) + 1
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
        since_s = self._places[request.number].since_s
        request.end_wait(now - since_s, was_aged=since_s <= self._aged_before_s(now))
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Remove a request if it waits."""
        place = self._places.pop(request.number, None)
        if place is None:
            return
        if place.ran:
            self._discard_returned(request)
        else:
            self._discard_fresh(place)

    def candidates(self, now: float, view: PrefixView | None) -> Iterator[Request]:
        """
        Yield the requests that may be admitted, next one first.

        The caller takes the request just yielded, goes on without taking it (it waits for something
        of its own, such as a prefix that is being written), or stops: a request that lacks blocks
        ends admission under every policy, since requests that overtake it would use up the blocks
        it waits for. The iterator stops by itself at an aged request that is not taken.

        Args:
            now: Present time, in seconds.
            view: The prefix cache; None where there is none, and then lpm and dfs-weight are fcfs.
        """
        for request in self._aged(now):
            yield request
            if request.number in self._places:
                return
        yield from self._not_aged(now, view)

    def in_order(self, now: float, view: PrefixView | None) -> Iterator[Request]:
        """Yield all waiting requests, next one first; O(n log n) at most."""
        yield from self._aged(now)
        yield from self._not_aged(now, view)

    @property
    def num_fresh(self) -> int:
        """Number of requests that never ran."""
        return len(self._fresh)

    def best_priority(self) -> int | None:
        """Return the best priority of any waiting request; None when none waits."""
        return min((*self._returned, *self._fresh_periods), default=None)

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

    def check_integrity(self) -> None:
        """
        Compare all indexes.

        Raises:
            InternalError: Two of them differ.
        """
        for heap in (self._levels, self._returned_since, self._returned_aged):
            heap.check_integrity()
        places = self._places
        ran = {number for number, place in places.items() if place.ran}
        fresh = places.keys() - ran
        levels, periods = dict[int, set[int]](), dict[int, Counter[int]]()
        for number in fresh:
            priority, period = places[number].request.new.priority, places[number].period
            levels.setdefault(priority + period, set()).add(number)
            periods.setdefault(priority, Counter())[period] += 1
        in_buckets = {level: bucket.numbers() for level, bucket in self._levels}
        if not (fresh == self._fresh.keys() and levels == in_buckets):
            raise InternalError("the queue's indexes of requests that never ran differ")
        if periods != self._fresh_periods:
            raise InternalError("the queue's periods of requests that never ran differ")
        if list(self._fresh) != sorted(self._fresh):
            raise InternalError("requests that never ran are not in order of arrival")
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
        tokens = sum(request.terms.queued_tokens for request in self._fresh.values())
        if tokens != self.num_fresh_tokens:
            raise InternalError("the count of queued tokens is wrong")

    def _place(self, request: Request, now: float, *, ran: bool) -> _Place:
        since_s = now - request.times.waited_s
        period = floor(since_s / self._options.ageing_s)
        place = _Place(request, since_s, period, ran)
        self._places[request.number] = place
        return place

    def _discard_fresh(self, place: _Place) -> None:
        request, priority = place.request, place.request.new.priority
        del self._fresh[request.number]
        level = priority + place.period
        found = self._levels.get(level)
        assert found is not None
        bucket = found[1]
        bucket.discard(request)
        if not len(bucket):
            self._levels.discard(level)
        periods = self._fresh_periods[priority]
        periods[place.period] -= 1
        if not periods[place.period]:
            del periods[place.period]
            if not periods:
                del self._fresh_periods[priority]
        self.num_fresh_tokens -= request.terms.queued_tokens

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
        fresh = self._aged_fresh(before_s)
        return heapq.merge(self._returned_aged, fresh, key=lambda request: request.number)

    def _aged_fresh(self, before_s: float) -> Iterator[Request]:
        """Yield the aged requests that never ran: sorted by arrival, so the aged stand first."""
        while self._fresh:
            head = next(iter(self._fresh.values()))
            if self._places[head.number].since_s > before_s:
                return
            yield head
            if head.number in self._places:
                break
        for request in list(self._fresh.values())[1:]:
            place = self._places.get(request.number)
            if place is not None and place.since_s > before_s:
                return
            if place is not None:
                yield request

    def _not_aged(self, now: float, view: PrefixView | None) -> Iterator[Request]:
        before_s, num_waiting = self._aged_before_s(now), len(self)
        returned = deque(sorted((self._returned_level(one), one) for one in self._returned))
        for level, bucket in self._levels:
            while returned and returned[0][0] <= level:
                yield from self._returned_of(returned.popleft()[1], before_s)
            for request in bucket.in_order(view, num_waiting):
                if self._places[request.number].since_s > before_s:
                    yield request
        for _, priority in returned:
            yield from self._returned_of(priority, before_s)

    def _returned_level(self, priority: int) -> int:
        """Return the best level of all waiting requests with this priority."""
        first = self._returned[priority].by_period.peek()
        assert first is not None
        fresh = self._fresh_periods.get(priority)
        period = first[1] if fresh is None else min(first[1], next(iter(fresh)))
        return priority + period

    def _returned_of(self, priority: int, before_s: float) -> Iterator[Request]:
        for request in self._returned[priority].by_number:
            if self._places[request.number].since_s > before_s:
                yield request
