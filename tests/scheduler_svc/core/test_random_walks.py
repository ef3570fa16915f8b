"""Long random histories, each fixed by its seed."""

from __future__ import annotations

import pytest

from tests.scheduler_svc.core.random_walk import walk, walk_all


class TestRandomWalks:
    @pytest.mark.parametrize("first_seed", range(0, 60, 10))
    def test_short_walks_keep_every_promise(self, first_seed):
        """
        Any options and any history: limits hold, nothing leaks or starves, tokens are exact.
        """
        walk_all(range(first_seed, first_seed + 10), num_events=25)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(10_000, 10_040))
    def test_long_walks_keep_every_promise(self, seed):
        """
        The same over histories of many requests.
        """
        walk(seed, num_events=400)
