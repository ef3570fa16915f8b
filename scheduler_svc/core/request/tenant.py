"""Limits and share of one tenant, as the frontend's identity of a caller carries them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.errors import InvalidConfig

NO_TENANT = ""
"""Tenant of requests without one: they share one turn, and no limit of tenants holds for them."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Range of `TenantLimits.weight`: a share outside would starve this tenant, or all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """
    Limits of one tenant; None leaves one to the option `max_tenant_requests`,
    `max_tenant_queued_tokens` or `tenant_tokens_per_minute`, which holds for all tenants.

    Attributes:
        max_requests: Most requests in the system, each choice counts, at least 1.
        max_queued_tokens: Most uncached prompt tokens of requests that never ran and wait, at least
            1.
        tokens_per_minute: Most tokens of prompts and outputs in a minute, at least 1.
        weight: Share of the tokens computed while several tenants wait, relative to the weights of
            the others; 0.001 to 1000.
    """

    max_requests: int | None = None
    max_queued_tokens: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0

    def validate(self) -> None:
        """
        Check every range.

        Raises:
            InvalidConfig: A value is out of range; the error names the first one.
        """
        limits = {
            "max_requests": self.max_requests,
            "max_queued_tokens": self.max_queued_tokens,
            "tokens_per_minute": self.tokens_per_minute,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} is {value}: it must be at least 1", field=name)
        if not (math.isfinite(self.weight) and MIN_WEIGHT <= self.weight <= MAX_WEIGHT):
            message = f"weight is {self.weight}: it must be from {MIN_WEIGHT} to {MAX_WEIGHT}"
            raise InvalidConfig(message, field="weight")


DEFAULT_TENANT_LIMITS = TenantLimits()
"""Limits of a tenant for which nothing of its own was set."""
