"""Waiting requests of one tenant that never ran, in the order in which the tenant has them run."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.invariants import require
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.policies import Bucket, PrefixView, bucket_of
from scheduler_svc.core.request.options import SchedulePolicy
from scheduler_svc.core.request.request import Request


@dataclass(frozen=True, slots=True)
class QueuePlace:
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


class Periods:
    """Number of requests that never ran by priority, and by the period since which they wait."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, OrderedDict[int, int]] = {}
        """Counts by priority and then by period, ascending."""

    def add(self, priority: int, period: int) -> None:
        """Count a request; no request has a later period."""
        periods = self._counts.setdefault(priority, OrderedDict())
        periods[period] = periods.get(period, 0) + 1

    def remove(self, priority: int, period: int) -> None:
        """Count a request less."""
        periods = self._counts[priority]
        periods[period] -= 1
        if not periods[period]:
            del periods[period]
            if not periods:
                del self._counts[priority]

    def first(self, priority: int) -> int | None:
        """Return the earliest period of any request with this priority; None without one."""
        periods = self._counts.get(priority)
        return None if periods is None else next(iter(periods))

    def best_level(self, not_before: float) -> float:
        """
        Return the best level of any request, as if none had waited since before a period; there is
        one. O(number of priorities).
        """
        firsts = ((one, next(iter(periods))) for one, periods in self._counts.items())
        return min(priority + max(first, not_before) for priority, first in firsts)

    def priorities(self) -> Iterable[int]:
        """Return the priorities of all requests."""
        return self._counts.keys()

    def check_integrity(self, places: Iterable[QueuePlace]) -> None:
        """
        Count anew.

        Raises:
            InternalError: A count is wrong, or periods are not ascending.
        """
        expected: dict[int, Counter[int]] = {}
        for place in places:
            expected.setdefault(place.request.new.priority, Counter())[place.period] += 1
        counts = {priority: dict(periods) for priority, periods in self._counts.items()}
        require(counts == expected, "the queue's periods of requests that never ran differ")
        ascending = all(list(one) == sorted(one) for one in self._counts.values())
        require(ascending, "the queue's periods of requests that never ran are not ascending")


class TenantQueue:
    """
    Requests of one tenant that never ran: aged ones in order of arrival, then by level, and within
    a level in the order of the policy; see `queue.WaitingQueue`.

    Adding and removing take O(log n), the first request too under fcfs, lof and random.

    Attributes:
        num_tokens: Sum of `Request.terms.queued_tokens` of its requests.
    """

    __slots__ = ("_levels", "_periods", "_places", "_policy", "num_tokens")

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._places: OrderedDict[int, QueuePlace] = OrderedDict()
        """Places by the number of their request, in order of arrival."""
        self._levels: KeyedHeap[float, tuple[int, Bucket]] = KeyedHeap()
        """Requests by level, one bucket each."""
        self._periods = Periods()
        self.num_tokens = 0

    def add(self, place: QueuePlace) -> None:
        """Add a request that arrived after all others here."""
        request = place.request
        self._places[request.number] = place
        level = request.new.priority + place.period
        found = self._levels.get(level)
        if found is None:
            found = level, bucket_of(self._policy)
            self._levels.push(level, level, found)
        found[1].add(request)
        self._periods.add(request.new.priority, place.period)
        self.num_tokens += request.terms.queued_tokens

    def discard(self, place: QueuePlace) -> None:
        """Remove a request that is here."""
        request = place.request
        del self._places[request.number]
        level = request.new.priority + place.period
        found = self._levels.get(level)
        assert found is not None
        bucket = found[1]
        bucket.discard(request)
        if not len(bucket):
            self._levels.discard(level)
        self._periods.remove(request.new.priority, place.period)
        self.num_tokens -= request.terms.queued_tokens

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __iter__(self) -> Iterator[QueuePlace]:
        """Yield all places in order of arrival."""
        return iter(self._places.values())

    def newest_first(self) -> Iterator[Request]:
        """Yield all requests, the latest arrival first."""
        return (place.request for place in reversed(self._places.values()))

    @property
    def oldest(self) -> QueuePlace:
        """The place of the request that arrived first; there is one."""
        return next(iter(self._places.values()))

    def best_level(self, not_before: float) -> float:
        """Return the best level of its requests, as if none had waited since before a period."""
        return self._periods.best_level(not_before)

    def aged(self, before_s: float) -> Iterator[Request]:
        """
        Yield the requests that wait since `before_s` or longer: sorted by arrival, so they stand
        first. The one that was yielded last may be removed meanwhile.
        """
        while self._places:
            head = next(iter(self._places.values()))
            if head.since_s > before_s:
                return
            yield head.request
            if head.request.number in self._places:
                break
        for place in list(self._places.values())[1:]:
            if place.since_s > before_s:
                return
            if place.request.number in self._places:
                yield place.request

    def not_aged(
        self, before_s: float, view: PrefixView | None, num_waiting: int
    ) -> Iterator[tuple[float, Request]]:
        """
        Yield the requests that wait for a shorter time, each with its level, in order. The one that
        was yielded last may be removed meanwhile.

        Args:
            before_s: Time since which aged requests wait.
            view: The prefix cache; None where there is none.
            num_waiting: Requests in the whole queue.
        """
        for level, bucket in self._levels:
            for request in bucket.in_order(view, num_waiting):
                if self._places[request.number].since_s > before_s:
                    yield level, request

    def check_integrity(self) -> None:
        """
        Compare all indexes.

        Raises:
            InternalError: Two of them differ.
        """
        self._levels.check_integrity()
        levels: dict[int, set[int]] = {}
        for number, place in self._places.items():
            require(not place.ran, "a request that ran is among those that never ran")
            levels.setdefault(place.request.new.priority + place.period, set()).add(number)
        in_buckets = {level: bucket.numbers() for level, bucket in self._levels}
        require(levels == in_buckets, "the queue's indexes of requests that never ran differ")
        in_order = list(self._places) == sorted(self._places)
        require(in_order, "requests that never ran are not in order of arrival")
        self._periods.check_integrity(self._places.values())
        tokens = sum(place.request.terms.queued_tokens for place in self._places.values())
        require(tokens == self.num_tokens, "the count of a tenant's queued tokens is wrong")
