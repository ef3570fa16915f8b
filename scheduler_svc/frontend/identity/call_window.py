"""How many calls begin while the event loop is late, so that tenants with few do not wait."""

from __future__ import annotations

from collections.abc import Callable

LATE_S = 0.0012
"""Lateness of a timer from which the loop counts as late."""
GUARD_S = 1.0
"""Seconds for which calls are held back after the last one of a tenant with few."""
_PLACES_PER_KEPT = 8
_SHRINK = 0.97
_GROW = 0.1
"""Change of the window by one timer that was late, and by one that was not."""


def num_kept(num_places: int) -> int:
    """
    Return how many places tenants with few calls always find beside those with many, and those with
    many beside them: an eighth of all, at least one, but never all.
    """
    return min(num_places - 1, max(1, num_places // _PLACES_PER_KEPT))


class FewGuard:
    """Memory of the tenant with few that began a call last; others leave it room for `GUARD_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: Monotonic clock.
        """
        self._clock = clock
        self._newest = ("", clock())
        """Tenant that was guarded last, and until when."""
        self._other = self._newest
        """The same of the last one that is not this tenant."""

    def guard(self, tenant: str) -> None:
        """Note that a tenant with few begins a call."""
        if self._newest[0] != tenant:
            self._other = self._newest
        self._newest = (tenant, self._clock() + GUARD_S)

    def is_on(self, tenant: str) -> bool:
        """Return whether this tenant is to leave room to another one."""
        name, until_s = self._newest
        return self._clock() < (self._other[1] if name == tenant else until_s)


class CallWindow:
    """
    Most calls that are served at a time while calls of a tenant with few are among them.

    A call passes about eight turns of the event loop before its first token. Once many calls keep
    the loop busy all the time, each turn is long, and every call waits for each of its turns, even
    if it goes first. A window like that of TCP's congestion control keeps the loop just under that:
    it shrinks by a part when a timer fires late and grows by a step when one does not, and settles
    where about one timer in twenty is late.

    It costs throughput, so it holds a tenant only for `GUARD_S` after a call of another one that
    has few, and never goes below an eighth of the places, nor below one. Pure; the clock is given.
    """

    def __init__(self, max_calls: int, clock: Callable[[], float]) -> None:
        """
        Args:
            max_calls: Places in the core, so most calls that are of use at a time.
            clock: Monotonic clock.
        """
        self._few = FewGuard(clock)
        self._least = max(1.0, float(num_kept(max_calls)))
        self._most = max(1.0, float(max_calls))
        self._size = max(1.0, max_calls / 4)

    @property
    def size(self) -> float:
        """Most calls at a time, now."""
        return self._size

    def guard(self, tenant: str) -> None:
        """Note that a tenant with few begins a call."""
        self._few.guard(tenant)

    def is_open(self, tenant: str, num_calls: int) -> bool:
        """Return whether a tenant with many may begin a call beside the `num_calls` there are."""
        return num_calls < self._size or not self._few.is_on(tenant)

    def note_timer(self, late_s: float) -> None:
        """Adapt to a timer that fired `late_s` seconds after its time while calls were held."""
        if late_s > LATE_S:
            self._size = max(self._least, self._size * _SHRINK)
        else:
            self._size = min(self._most, self._size + _GROW)
