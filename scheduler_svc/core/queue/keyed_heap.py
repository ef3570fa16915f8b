"""A heap of numbered items that can be removed from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from scheduler_svc.core.invariants import require

Order = TypeVar("Order", float, tuple[float, float, float])
T = TypeVar("T")
_MIN_STALE = 64


class KeyedHeap(Generic[Order, T]):
    """
    Heap with items that can be removed by number.

    Adding takes O(log n), removal O(1): the heap entry stays until it surfaces or until stale
    entries outnumber live ones.
    """

    __slots__ = ("_heap", "_items")

    def __init__(self) -> None:
        self._heap: list[tuple[Order, int]] = []
        self._items: dict[int, tuple[Order, T]] = {}

    def push(self, order: Order, number: int, item: T) -> None:
        """Add an item that is not there; lower `order` surfaces first, then lower `number`."""
        heapq.heappush(self._heap, (order, number))
        self._items[number] = order, item

    def discard(self, number: int) -> None:
        """Remove an item if it is there."""
        if self._items.pop(number, None) is None:
            return
        if len(self._heap) > 2 * len(self._items) + _MIN_STALE:
            self._heap = [(order, number) for number, (order, _) in self._items.items()]
            heapq.heapify(self._heap)

    def get(self, number: int) -> T | None:
        """Return the item with this number; None if it is not there."""
        found = self._items.get(number)
        return None if found is None else found[1]

    def order_of(self, number: int) -> Order | None:
        """Return the order of the item with this number; None if it is not there."""
        found = self._items.get(number)
        return None if found is None else found[0]

    def peek(self) -> tuple[Order, T] | None:
        """Return order and item at the top; None when empty."""
        while self._heap:
            order, number = self._heap[0]
            found = self._items.get(number)
            if found is not None and found[0] == order:
                return found
            heapq.heappop(self._heap)
        return None

    def peek_due(self, order: Order) -> T | None:
        """Return the item at the top if its order is at most this one, else None."""
        if not self._heap or self._heap[0][0] > order:
            return None  # nearly always; an entry of a removed item is no later than any item
        top = self.peek()
        return None if top is None or top[0] > order else top[1]

    def check_integrity(self) -> None:
        """
        Check that each item has its entry in the heap.

        Raises:
            InternalError: One would never surface.
        """
        entries = {(order, number) for number, (order, _) in self._items.items()}
        require(entries <= set(self._heap), "an item of a heap would never surface")

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, number: int) -> bool:
        return number in self._items

    def __iter__(self) -> Iterator[T]:
        """
        Yield the items in order. The one yielded last may be removed meanwhile; items may also be
        added, and these may be left out. While each item is removed in turn the next takes
        O(log n).
        """
        while self.peek() is not None:
            entry = self._heap[0]
            yield self._items[entry[1]][1]
            if not self._is_live(entry):
                continue
            last = entry
            for entry in sorted(self._heap):
                # An item that left and came back with the same order has two entries.
                if entry != last and self._is_live(entry):
                    yield self._items[entry[1]][1]
                last = entry
            return

    def _is_live(self, entry: tuple[Order, int]) -> bool:
        found = self._items.get(entry[1])
        return found is not None and found[0] == entry[0]
