"""
Tokens that each tenant was served, by which tenants take turns.

Source: the virtual token counter with length prediction, Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024, arXiv:2401.00588). Unlike there, what an output is longer or shorter
than expected counts when it has ended, and all start anew once no request waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from scheduler_svc.core.invariants import require
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.request.request import Request

OUTPUT_COST = 2.0
"""Cost of an output token; one of a prompt costs 1. The paper's weights."""
FIRST_EXPECTED = 256.0
"""Output tokens expected of a request before any has ended."""
MEAN_OVER = 32
"""Requests over which the mean of outputs is taken."""


@dataclass(slots=True, eq=False)
class _Account:
    """
    Counter of one tenant.

    Attributes:
        number: Number of the account, never reused.
        tenant: Its tenant.
        counter: Cost of its tokens by its weight, above that of tenants that wait as long.
        num_charged: Requests that were charged and have not ended.
        is_waiting: True while a request of the tenant waits that never ran.
    """

    number: int
    tenant: str
    counter: float
    num_charged: int = 0
    is_waiting: bool = False


class TokenCounters:
    """
    Virtual token counters of tenants that wait, run, or were served more than others.

    A request's uncached prompt and expected output are charged at its first admission, the
    difference to its real output at its end, both by the tenant's weight. A tenant that starts to
    wait is lifted to the least counter of those that wait: it owes what it had more than these, and
    has saved nothing up. A tenant that nothing is to be remembered of takes no memory.
    """

    __slots__ = (
        "_accounts", "_charges", "_floor", "_highest", "_idle", "_mean_outputs", "_next_number",
        "_waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._charges: dict[int, float] = {}
        """Output tokens charged for requests that have not ended, by their number."""
        self._waiting: KeyedHeap[float, _Account] = KeyedHeap()
        """Accounts of tenants that wait, by counter."""
        self._idle: KeyedHeap[float, _Account] = KeyedHeap()
        """Accounts of tenants that neither wait nor run, by counter, which is over the floor."""
        self._floor = 0.0
        """Counter that a tenant starts to wait with at least; it only grows."""
        self._highest = 0.0
        """Largest counter that any tenant had."""
        self._mean_outputs = FIRST_EXPECTED
        self._next_number = 0

    def of(self, tenant: str) -> float:
        """Return the counter of a tenant that waits."""
        return self._accounts[tenant].counter

    def start_waiting(self, tenant: str) -> None:
        """Note that a first request of a tenant waits."""
        account = self._account(tenant)
        self._idle.discard(account.number)
        account.is_waiting = True
        self._set(account, max(account.counter, self._floor))

    def stop_waiting(self, tenant: str) -> None:
        """Note that no request of a tenant waits any more that never ran."""
        account = self._accounts[tenant]
        account.is_waiting = False
        self._waiting.discard(account.number)
        if not len(self._waiting):
            self._floor = max(self._floor, self._highest)
        self._raise_floor()
        self._settle_idle(account)

    def charge(self, request: Request) -> None:
        """Charge a request that is admitted for the first time to its tenant, which waits."""
        left = request.terms.stop_len - request.num_known
        expected = min(float(left), self._mean_outputs)
        cost = request.terms.queued_tokens + OUTPUT_COST * expected
        account = self._accounts[request.new.tenant]
        account.num_charged += 1
        self._charges[request.number] = expected
        self._set(account, account.counter + cost / request.new.tenant_limits.weight)
        self._raise_floor()

    def settle(self, request: Request) -> bool:
        """
        Charge what the output of a request that has ended was longer than expected, or pay back
        what it was shorter; return True if this changed the counter of a tenant that waits.
        """
        expected = self._charges.pop(request.number, None)
        if expected is None:
            return False
        num_outputs = len(request.outputs) - request.terms.num_prior
        self._mean_outputs += (num_outputs - self._mean_outputs) / MEAN_OVER
        account = self._accounts[request.new.tenant]
        account.num_charged -= 1
        more = OUTPUT_COST * (num_outputs - expected) / request.new.tenant_limits.weight
        self._set(account, max(account.counter + more, 0.0))
        self._raise_floor()
        self._settle_idle(account)
        return account.is_waiting

    def check_integrity(
        self, waiting: Collection[str], charged: Collection[Request] | None
    ) -> None:
        """
        Compare the accounts with the requests.

        Args:
            waiting: Tenants with requests that wait and never ran.
            charged: Live requests that were admitted once; None to leave them out.

        Raises:
            InternalError: An account is wrong, missing or not needed.
        """
        self._waiting.check_integrity()
        self._idle.check_integrity()
        accounts = self._accounts.values()
        if charged is not None:
            numbers = {request.number for request in charged}
            require(numbers == self._charges.keys(), "charged requests are not those that ran")
            counts = Counter(request.new.tenant for request in charged)
            counted = {one.tenant: one.num_charged for one in accounts if one.num_charged}
            require(counts == counted, "a tenant's count of charged requests is wrong")
        in_heap = sorted(one.tenant for one in self._waiting)
        marked = sorted(one.tenant for one in accounts if one.is_waiting)
        require(sorted(waiting) == in_heap == marked, "the tenants that wait have other accounts")
        idle = {one.tenant for one in accounts if not (one.is_waiting or one.num_charged)}
        require(idle == {one.tenant for one in self._idle}, "an account is kept without a reason")
        require(all(one.counter > self._floor for one in self._idle), "a settled account is kept")

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._next_number, tenant, 0.0)
            self._next_number += 1
        return account

    def _set(self, account: _Account, counter: float) -> None:
        account.counter = counter
        self._highest = max(self._highest, counter)
        if account.is_waiting:
            self._waiting.discard(account.number)
            self._waiting.push(counter, account.number, account)

    def _raise_floor(self) -> None:
        """Raise the floor to the least counter that waits, and forget tenants at or under it."""
        least = self._waiting.peek()
        if least is not None:
            self._floor = max(self._floor, least[0])
        while (top := self._idle.peek()) is not None and top[0] <= self._floor:
            self._idle.discard(top[1].number)
            del self._accounts[top[1].tenant]

    def _settle_idle(self, account: _Account) -> None:
        """Keep the account of a tenant without requests only as long as it owes something."""
        if account.is_waiting or account.num_charged:
            return
        self._idle.discard(account.number)
        if account.counter > self._floor:
            self._idle.push(account.counter, account.number, account)
        else:
            del self._accounts[account.tenant]
