"""Limits in force for a tenant, and the number of requests that each has in the system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.tenant import NO_TENANT, TenantLimits
from tandem.errors import InternalError

NOBODY = ""
"""Tenant of requests that are not counted."""


def limits_of(options: CoreOptions, new: NewRequest) -> TenantLimits:
    """
    Return the limits in force for a request's tenant: its own, else those of the options; none for
    a request without a tenant.
    """
    own = new.tenant_limits
    if new.tenant == NO_TENANT:
        return TenantLimits(weight=own.weight)
    return TenantLimits(
        max_requests=own.max_requests or options.max_tenant_requests,
        max_queued_tokens=own.max_queued_tokens or options.max_tenant_queued_tokens,
        tokens_per_minute=own.tokens_per_minute or options.tenant_tokens_per_minute,
        weight=own.weight,
    )


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
