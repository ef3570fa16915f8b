"""Shares of tenants in the calls that a frontend serves at a time, kept before it reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from scheduler_svc.core.queue.retry_advice import RetryAdvice
from scheduler_svc.frontend.identity.call_window import FewGuard, num_kept
from tandem.errors import QueueFull

_SERVICE = "/tandem.inference.v1.InferenceService"
PLACED = frozenset(f"{_SERVICE}/{name}" for name in ("Generate", "Complete"))
"""Methods of whose calls each takes a place in the core until it ends."""
SHARED = PLACED | {f"{_SERVICE}/{name}" for name in ("Tokenize", "Detokenize")}
"""Methods whose calls count: they take a place, or only this frontend's time."""
LOG_INTERVAL_S = 1.0
"""Seconds from one line about refused calls to the next; thousands may be refused in between."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(slots=True)
class _Tenant:
    """Calls of one kind and tenant that are being served, and the tenant's weight."""

    weight: float
    num_calls: int = 0


class _Served:
    """Calls of one kind that are being served."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._tenants: dict[str, _Tenant] = {}
        """Tenants with calls."""

    def begin(self, tenant: str, weight: float) -> None:
        """Count a call of a tenant from now on."""
        own = self._tenants.setdefault(tenant, _Tenant(weight))
        own.weight = weight
        own.num_calls += 1
        self.num_calls += 1

    def end(self, tenant: str) -> None:
        """Count a call no more."""
        own = self._tenants[tenant]
        self.num_calls -= 1
        own.num_calls -= 1
        if not own.num_calls:
            del self._tenants[tenant]

    def of_tenant(self, tenant: str, weight: float) -> tuple[int, float]:
        """Return how many calls a tenant has, and its part, by its weight, of those of all."""
        own = self._tenants.get(tenant)
        if own is None:
            return 0, 1.0
        weights = sum(one.weight for one in self._tenants.values()) - own.weight + weight
        return own.num_calls, weight / weights


class CallShares:
    """
    Calls that are being served, by tenant. Owned by the event loop.

    The core makes room for a tenant with fewer requests than others, but it sees a request only
    once its message was read, decoded, checked and tokenized, and all tenants' calls wait for that
    together. So while a frontend has as many calls as the core has places, it refuses another call
    of a tenant that has its share of them, from the call's metadata alone. It never refuses one of
    a tenant with less, nor one that takes no place: such calls only count, among themselves, for
    who has few.

    Where all requests of the core run, it has none that could make room. So for `GUARD_S` after a
    call of a tenant with few, an eighth of the places, at least one, counts as taken for others
    that have their share. Each frontend counts its own calls: with several, greedy tenants have all
    places where each frontend has fewer calls than that leaves. A tenant that is alone has all
    places.

    A call counts once, however many choices and log probabilities it asks for: that is not known
    before it is read, and it takes no more of what is shared here, which is the way of a message to
    the core. Afterwards the core counts every choice, for `max_num_seqs`, the queue and the
    tenant's own limits alike, so that a tenant has no more of them by asking for many at once; and
    output that a client has not read is bounded for all choices of a call, or all items of a batch,
    together (`max_pending_bytes`), with its log probabilities.
    """

    def __init__(self, max_calls: int, clock: Callable[[], float]) -> None:
        """
        Args:
            max_calls: Most requests that the core has in the system.
            clock: Monotonic clock.
        """
        self._max_calls = max_calls
        self._clock = clock
        self._placed, self._others = _Served(), _Served()
        """Calls that take a place in the core, and those that take none."""
        self._few = FewGuard(clock)
        self._advice = RetryAdvice()
        self._num_refused = 0

    def check(self, tenant: str, weight: float) -> None:
        """
        Check that a tenant of this weight may have another call that takes a place.

        Raises:
            QueueFull: All places are taken, or left to tenants with few, and the tenant has its
                share of them.
        """
        num_calls = self._placed.num_calls
        num_left = num_kept(self._max_calls) if self._few.is_on(tenant) else 0
        num_places = self._max_calls - num_left
        if num_calls < num_places:
            return
        num_own, part = self._placed.of_tenant(tenant, weight)
        share = max(1, int(num_places * part))
        if num_own < share:
            return
        self._note_refusal()
        left = f", of which {num_left} are left to tenants with few" if num_left else ""
        raise QueueFull(
            f"{num_calls} calls are being served and max_num_seqs is {self._max_calls}{left}; "
            f"tenant {tenant!r} has {num_own} of them and a share of {share}: try again when one "
            "has ended",
            metadata={"limit": "max_num_seqs", "value": str(self._max_calls)},
            retry_after_s=self._advice.after_ends(1, self._clock()),
        )

    def num_alike(self, *, takes_place: bool) -> int:
        """Return how many calls are served that take a place, or how many that take none."""
        return self._of_kind(takes_place=takes_place).num_calls

    def has_few(self, tenant: str, weight: float, *, takes_place: bool = True) -> bool:
        """
        Return whether the tenant has no calls of a kind, or less than half of what its weight would
        give it of those of all.
        """
        served = self._of_kind(takes_place=takes_place)
        num_own, part = served.of_tenant(tenant, weight)
        return not num_own or 2 * num_own < served.num_calls * part

    def begin(self, tenant: str, weight: float, *, takes_place: bool = True) -> None:
        """
        Count a call of a tenant from now on.

        Raises:
            QueueFull: It takes a place, and the tenant may not have another one.
        """
        if takes_place:
            self.check(tenant, weight)
            if self._placed.num_calls and self.has_few(tenant, weight):
                self._few.guard(tenant)
        self._of_kind(takes_place=takes_place).begin(tenant, weight)

    def end(self, tenant: str, *, takes_place: bool = True) -> None:
        """Count a call no more that has begun with the same arguments."""
        if takes_place:
            self._advice.note_end(self._clock())
        self._of_kind(takes_place=takes_place).end(tenant)

    def _of_kind(self, *, takes_place: bool) -> _Served:
        return self._placed if takes_place else self._others

    def _note_refusal(self) -> None:
        if not self._num_refused:
            asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._log_refusals)
        self._num_refused += 1

    def _log_refusals(self) -> None:
        _log.info("calls_refused", num_calls=self._num_refused, limit="max_num_seqs")
        self._num_refused = 0
