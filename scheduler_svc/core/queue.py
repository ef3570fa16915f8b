"""Who waits, in which order, and whose time is up."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from scheduler_svc.core.request import Request

T = TypeVar("T")
_MIN_STALE = 64


class KeyedHeap(Generic[T]):
    """
    A heap whose items can be removed by number.

    Removal is O(1): the heap entry stays until it surfaces or until stale entries outnumber live
    ones.
    """

    __slots__ = ("_heap", "_items")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._items: dict[int, T] = {}

    def push(self, order: float, number: int, item: T) -> None:
        """
        Add an item; lower `order` surfaces first, then lower `number`. A number always comes with
        the same order.
        """
        heapq.heappush(self._heap, (order, number))
        self._items[number] = item

    def discard(self, number: int) -> None:
        """Remove an item if it is there."""
        if self._items.pop(number, None) is None:
            return
        if len(self._heap) > 2 * len(self._items) + _MIN_STALE:
            self._heap = [entry for entry in set(self._heap) if entry[1] in self._items]
            heapq.heapify(self._heap)

    def peek(self) -> tuple[float, T] | None:
        """Order and item at the top; None when empty."""
        while self._heap:
            order, number = self._heap[0]
            if number in self._items:
                return order, self._items[number]
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def __iter__(self) -> Iterator[T]:
        """Items in order."""
        for _, number in sorted(set(self._heap)):
            if number in self._items:
                yield self._items[number]


class WaitingQueue:
    """
    First come, first served.

    Requests that ran before stand ahead of those that never did. Admission never skips the head, so
    everyone who ran arrived before everyone who did not, and the whole queue is in arrival order.
    """

    __slots__ = ("_fresh", "_returned")

    def __init__(self) -> None:
        self._returned: KeyedHeap[Request] = KeyedHeap()
        self._fresh: OrderedDict[int, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Put a new request at the end."""
        self._fresh[request.number] = request

    def put_back(self, request: Request) -> None:
        """Put a request that ran before at the front, behind returned ones that arrived earlier."""
        self._returned.push(request.number, request.number, request)

    def discard(self, request: Request) -> None:
        """Remove a request if it waits."""
        if self._fresh.pop(request.number, None) is None:
            self._returned.discard(request.number)

    def head(self) -> Request | None:
        """Who is next; None when nobody waits."""
        returned = self._returned.peek()
        if returned is not None:
            return returned[1]
        return next(iter(self._fresh.values()), None)

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._fresh or request.number in self._returned

    def __iter__(self) -> Iterator[Request]:
        """Everyone who waits, next one first."""
        yield from self._returned
        yield from self._fresh.values()
