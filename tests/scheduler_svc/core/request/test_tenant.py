"""Ranges of a tenant's limits."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.request.tenant import DEFAULT_TENANT_LIMITS, TenantLimits
from tandem.errors import InvalidConfig


class TestTenantLimits:
    def test_default_and_bounds_are_in_range(self):
        """
        Limits of 1, and weights from 0.001 to 1000, are accepted; none is set by default.
        """
        DEFAULT_TENANT_LIMITS.validate()
        for weight in (0.001, 1000.0):
            TenantLimits(
                max_requests=1, max_queued_tokens=1, tokens_per_minute=1, weight=weight
            ).validate()
        assert TenantLimits(weight=1.0) == DEFAULT_TENANT_LIMITS

    @pytest.mark.parametrize(
        ("name", "value"),
        [("max_requests", 0), ("max_queued_tokens", 0), ("tokens_per_minute", -1),
         ("weight", 0.0), ("weight", 1000.1), ("weight", float("nan"))],
    )  # fmt: skip
    def test_value_out_of_range_is_refused_by_name(self, name: str, value: Any):
        """
        A limit under 1, or a weight outside its range, is refused with the name of its field.
        """
        with pytest.raises(InvalidConfig, match=f"{name} is {value}") as error:
            TenantLimits(**{name: value}).validate()
        assert name == error.value.field
