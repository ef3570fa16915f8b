"""Number of requests that each tenant has in the system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tandem.errors import InternalError

NOBODY = ""
"""Tenant of requests that are not counted."""


class TenantCounts:
    """Number of live choices per tenant; tenants without any take no memory."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, tenant: str) -> None:
        """Count one more choice of a tenant."""
        if tenant != NOBODY:
            self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def remove(self, tenant: str) -> None:
        """Count one choice of a tenant less."""
        if tenant != NOBODY:
            left = self._counts[tenant] - 1
            if left:
                self._counts[tenant] = left
            else:
                del self._counts[tenant]

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's live choices; 0 for the tenant that is not counted."""
        return self._counts.get(tenant, 0)

    def check_integrity(self, tenants: Iterable[str]) -> None:
        """
        Compare with the tenants of all live choices.

        Raises:
            InternalError: A count is wrong.
        """
        expected = Counter(tenant for tenant in tenants if tenant != NOBODY)
        if expected != self._counts:
            raise InternalError(f"tenants have {dict(expected)} requests, counted {self._counts}")
