"""Tokens a minute of each tenant."""

from __future__ import annotations

import heapq

from scheduler_svc.core.invariants import require

MINUTE_S = 60.0


class TokenRates:
    """
    Token buckets of tenants, each as large as the tokens of one minute, full at first.

    A bucket is kept as the time at which it will be full again (the generic cell rate algorithm of
    ATM networks, ITU-T I.371), so it refills by itself; it may be overdrawn. A full bucket takes no
    memory.
    """

    __slots__ = ("_due", "_full_at_s")

    def __init__(self) -> None:
        self._full_at_s: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []
        """One entry for each tenant, not after the time at which its bucket is full."""

    def wait_s(self, tenant: str, num_tokens: int, per_minute: int, now: float) -> float:
        """
        Return the seconds until a tenant's bucket holds this many tokens, at most `per_minute`; 0
        if it does now.
        """
        full_at_s = self._full_at_s.get(tenant, now)
        return max(full_at_s - now - (1.0 - num_tokens / per_minute) * MINUTE_S, 0.0)

    def spend(self, tenant: str, num_tokens: int, per_minute: int, now: float) -> None:
        """Take tokens out of a tenant's bucket, also if it has too few."""
        self._forget_full(now)
        if tenant not in self._full_at_s:
            heapq.heappush(self._due, (now, tenant))
        full_at_s = max(self._full_at_s.get(tenant, now), now)
        self._full_at_s[tenant] = full_at_s + num_tokens * MINUTE_S / per_minute

    def __len__(self) -> int:
        """Return the number of buckets that may not be full."""
        return len(self._full_at_s)

    def check_integrity(self) -> None:
        """
        Check that each bucket is forgotten some time.

        Raises:
            InternalError: One would be kept for ever, or forgotten twice.
        """
        tenants = sorted(tenant for _, tenant in self._due)
        require(tenants == sorted(self._full_at_s), "a bucket of tokens would be kept for ever")
        early = all(due_s <= self._full_at_s[tenant] for due_s, tenant in self._due)
        require(early, "a full bucket of tokens is kept")

    def _forget_full(self, now: float) -> None:
        """Forget up to two buckets that are full, so that a call takes O(log n)."""
        for _ in range(2):
            if not self._due or self._due[0][0] > now:
                return
            tenant = self._due[0][1]
            full_at_s = self._full_at_s[tenant]
            if full_at_s > now:
                heapq.heapreplace(self._due, (full_at_s, tenant))
            else:
                heapq.heappop(self._due)
                del self._full_at_s[tenant]
