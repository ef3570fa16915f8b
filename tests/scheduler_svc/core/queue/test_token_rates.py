"""Tokens a minute of tenants: a bucket that refills by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.queue.token_rates import TokenRates
from tandem.errors import InternalError


class TestTokenRates:
    def test_a_minute_s_tokens_are_there_at_once_and_refill_in_a_minute(self):
        """
        A bucket starts full, tells how long it takes to hold what is asked for, and is full again
        after a minute.
        """
        rates = TokenRates()
        assert 0.0 == rates.wait_s("a", 600, 600, 5.0)
        rates.spend("a", 600, 600, 5.0)
        assert (0.0, 1.0, 60.0) == tuple(rates.wait_s("a", n, 600, 5.0) for n in (0, 10, 600))
        assert (0.0, 30.0) == tuple(rates.wait_s("a", n, 600, 35.0) for n in (300, 600))
        assert 0.0 == rates.wait_s("a", 600, 600, 65.0)

    def test_a_bucket_may_be_overdrawn(self):
        """
        A bucket that is overdrawn takes longer to refill.
        """
        rates = TokenRates()
        rates.spend("a", 1800, 600, 0.0)
        assert 120.0 + 60.0 == rates.wait_s("a", 600, 600, 0.0)

    def test_tenants_have_buckets_of_their_own(self):
        """
        No tenant spends the tokens of another.
        """
        rates = TokenRates()
        rates.spend("a", 600, 600, 0.0)
        assert 0.0 == rates.wait_s("b", 600, 600, 0.0)

    @given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 900), st.floats(0, 90))))
    @settings(max_examples=60, deadline=None)
    def test_buckets_hold_what_a_model_says_and_are_forgotten(self, spent):
        """
        Buckets agree with ones that are refilled step by step, and full ones are forgotten.
        """
        rates, now, levels = TokenRates(), 0.0, {}
        for number, tokens, wait_s in spent:
            now += wait_s
            levels = {key: min(level + wait_s * 10, 600.0) for key, level in levels.items()}
            tenant = f"t{number}"
            levels[tenant] = levels.get(tenant, 600.0) - tokens
            rates.spend(tenant, tokens, 600, now)
            rates.check_integrity()
            for key, level in levels.items():
                wait = rates.wait_s(key, 300, 600, now)
                # Sums of up to sixty products, each rounded to 1e-13.
                assert max(300 - level, 0.0) / 10 == pytest.approx(wait, abs=1e-6)
        for _ in range(len(spent) + 1):
            now += 10_000.0
            rates.spend("last", 1, 600, now)
        assert 1 == len(rates)

    def test_a_bucket_that_would_stay_for_ever_is_noticed(self):
        """
        A bucket without an entry among those to be forgotten fails the check.
        """
        rates = TokenRates()
        rates.spend("a", 1, 600, 0.0)
        rates._due.clear()
        with pytest.raises(InternalError, match="kept for ever"):
            rates.check_integrity()
