"""Calls that have come and are not served yet, in the order in which callers take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Call = TypeVar("Call")

_NONE_MAY = object()
"""A caller may be None."""


class CallLine(Generic[Call]):
    """
    Calls of one method that wait for their turn. Each caller's are in their order; callers take
    turns, so that one with few calls does not wait for those of one with thousands.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[Hashable, deque[Call]] = OrderedDict()
        """Callers with calls, the next to have a turn first."""
        self._num_calls = 0

    def __len__(self) -> int:
        return self._num_calls

    def add(self, caller: Hashable, call: Call) -> None:
        """Let a call wait behind its caller's others."""
        self._calls.setdefault(caller, deque()).append(call)
        self._num_calls += 1

    def take(self, may_begin: Callable[[Hashable], bool]) -> Call | None:
        """Take the call of the next caller that may begin one; None if there is none."""
        caller = next(filter(may_begin, self._calls), _NONE_MAY)
        if caller is _NONE_MAY:
            return None
        calls = self._calls[caller]
        call = calls.popleft()
        self._num_calls -= 1
        if calls:
            self._calls.move_to_end(caller)
        else:
            del self._calls[caller]
        return call

    def take_all(self) -> list[Call]:
        """Take every call."""
        taken = [call for calls in self._calls.values() for call in calls]
        self._calls.clear()
        self._num_calls = 0
        return taken
