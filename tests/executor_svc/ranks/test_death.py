"""Ranks that die, fall silent, or end."""

from __future__ import annotations

import signal

import pytest

from tests.executor_svc.ranks.processes import RankedExecutor

pytestmark = pytest.mark.slow


@pytest.fixture
def ranked(tmp_path, bundled_model):
    executor = RankedExecutor(bundled_model, tmp_path, "--max-num-blocks=64")
    yield executor
    executor.end()


class TestDeath:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_killed_rank_ends_all(self, ranked, rank):
        """
        After kill -9 of a rank no rank is left, and rank 0 says which one it missed.
        """
        ranked.signal(rank, signal.SIGKILL)
        ranked.wait_gone()
        if rank:
            assert 1 == ranked.process.returncode
            assert "rank 1 of the model is gone" in ranked.log.read_text()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_stopped_rank_ends_all(self, ranked, rank):
        """
        A rank that is stopped (SIGSTOP) while the executor is idle is missed, and no rank is left.
        """
        ranked.signal(rank, signal.SIGSTOP)
        ranked.wait_gone()
        assert f"rank {rank} of the model has not been heard for 2 s" in ranked.log.read_text()

    def test_sigterm_ends_all_in_good_order(self, ranked):
        """
        SIGTERM of rank 0 ends it with exit code 0, and the other ranks without a word.
        """
        ranked.signal(0, signal.SIGTERM)
        ranked.wait_gone()
        assert 0 == ranked.process.returncode
        assert "is gone" not in ranked.log.read_text()

    def test_killed_rank_of_a_later_stage_ends_all(self, tmp_path, bundled_model):
        """
        Ranks of all stages are missed alike.
        """
        sizes = {"tp_size": 2, "pp_size": 2}
        executor = RankedExecutor(bundled_model, tmp_path, "--max-num-blocks=64", **sizes)
        try:
            assert 4 == len(executor.ranks)
            executor.signal(3, signal.SIGKILL)
            executor.wait_gone()
        finally:
            executor.end()
        assert 1 == executor.process.returncode
        assert "rank 3 of the model is gone" in executor.log.read_text()
