"""Limits of a tenant: requests, queued tokens, and tokens a minute."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.tenant import TenantLimits
from tandem.errors import NeverFits, QueueFull
from tests.scheduler_svc.core.harness import Rig, small_config


def rig_of(max_batch_size: int = 4, **options) -> Rig:
    return Rig(small_config(max_batch_size=max_batch_size), options=CoreOptions(**options))


def limit_of(error) -> tuple[str, str]:
    metadata = error.value.metadata
    return metadata["limit"], metadata["value"]


class TestOverrides:
    def test_a_tenant_s_own_limits_go_ahead_of_the_options(self):
        """
        A tenant's own limit, higher or lower, holds in place of the option.
        """
        rig = rig_of(max_tenant_requests=2)
        for _ in range(3):
            rig.submit(tenant="big", tenant_limits=TenantLimits(max_requests=3))
        with pytest.raises(QueueFull, match="max_tenant_requests is 3"):
            rig.submit(tenant="big", tenant_limits=TenantLimits(max_requests=3))
        rig.submit(tenant="small", tenant_limits=TenantLimits(max_requests=1))
        with pytest.raises(QueueFull, match="max_tenant_requests is 1"):
            rig.submit(tenant="small", tenant_limits=TenantLimits(max_requests=1))

    def test_requests_without_a_tenant_have_no_limit(self):
        """
        No limit of tenants holds for requests without one.
        """
        rig = rig_of(max_tenant_requests=1, max_tenant_queued_tokens=5, tenant_tokens_per_minute=5)
        for _ in range(4):
            rig.submit(prompt_len=9)
        assert 4 == rig.core.num_requests


class TestQueuedTokens:
    def test_as_many_tokens_of_a_tenant_wait_as_are_allowed(self):
        """
        A tenant's prompts of exactly its limit wait, one token more is refused with the limit's
        name, and another tenant's prompt is taken.
        """
        rig = rig_of(1, max_tenant_queued_tokens=20)
        rig.submit(prompt_len=12, tenant="red")
        with pytest.raises(QueueFull, match=r"12 prompt tokens of tenant 'red'") as error:
            rig.submit(prompt_len=9, tenant="red")
        assert ("max_tenant_queued_tokens", "20") == limit_of(error)
        rig.submit(prompt_len=8, tenant="red")
        rig.submit(prompt_len=20, tenant="blue")

    def test_admitted_prompts_make_room(self):
        """
        Tokens stop to count when their request is admitted, or ends.
        """
        rig = rig_of(1, max_tenant_queued_tokens=10)
        rig.submit(prompt_len=10, tenant="red")
        rig.step()
        waits = rig.submit(prompt_len=10, tenant="red")
        with pytest.raises(QueueFull):
            rig.submit(prompt_len=1, tenant="red")
        rig.core.end_handle(waits, FinishReason.CANCELLED, rig.now)
        rig.submit(prompt_len=10, tenant="red")

    def test_a_longer_prompt_never_fits(self):
        """
        A prompt longer than a tenant may ever have queued is refused for good.
        """
        with pytest.raises(NeverFits) as error:
            rig_of(max_tenant_queued_tokens=8).submit(prompt_len=9, tenant="red")
        assert ("max_tenant_queued_tokens", "8") == limit_of(error)


class TestTokensPerMinute:
    def test_a_tenant_out_of_tokens_is_told_when_to_retry(self):
        """
        A refusal says in how many seconds the bucket holds the prompt's tokens, and the request is
        taken then, not earlier.
        """
        rig = rig_of(tenant_tokens_per_minute=60)
        rig.submit(prompt_len=40, max_tokens=1, tenant="red")
        rig.submit(prompt_len=20, max_tokens=1, tenant="red")
        with pytest.raises(QueueFull) as error:
            rig.submit(prompt_len=12, max_tokens=1, tenant="red")
        assert ("tenant_tokens_per_minute", "60") == limit_of(error)
        assert 12.0 == error.value.retry_after_s
        rig.submit(prompt_len=40, max_tokens=1, tenant="blue")
        rig.now += 11.9
        with pytest.raises(QueueFull):
            rig.submit(prompt_len=12, max_tokens=1, tenant="red")
        rig.now += 0.1
        rig.submit(prompt_len=12, max_tokens=1, tenant="red")

    def test_outputs_count_when_they_end(self):
        """
        The tokens that a request produced delay its tenant's next one; those it asked for do not.
        """
        rig = rig_of(tenant_tokens_per_minute=60)
        first = rig.submit(prompt_len=10, max_tokens=30, tenant="red")
        rig.submit(prompt_len=10, max_tokens=30, tenant="red")
        rig.run()
        assert 30 == rig.ended[first].num_output_tokens
        wait_s = rig.core._cell.token_rates.wait_s("red", 60, 60, rig.now)
        assert 80.0 - rig.now <= wait_s <= 80.0

    def test_a_refused_request_spends_nothing(self):
        """
        Tokens are spent by accepted requests only.
        """
        rig = rig_of(tenant_tokens_per_minute=60, max_tenant_requests=1)
        rig.submit(prompt_len=30, tenant="red")
        with pytest.raises(QueueFull, match="max_tenant_requests"):
            rig.submit(prompt_len=30, tenant="red")
        assert 0.0 == rig.core._cell.token_rates.wait_s("red", 30, 60, rig.now)

    def test_a_prompt_over_a_minute_s_tokens_never_fits(self):
        """
        A prompt with more tokens than a whole minute has is refused for good.
        """
        with pytest.raises(NeverFits) as error:
            rig_of(tenant_tokens_per_minute=8).submit(prompt_len=9, tenant="red")
        assert ("tenant_tokens_per_minute", "8") == limit_of(error)
