"""One engine whose model is spread over several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import OutOfMemory
from tests.clients.embedded.parallel import on_ranks
from tests.executor_svc.parallel.rank_pool import RankPool
from tests.model_zoo import llama_mha


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return llama_mha(tmp_path_factory.mktemp("models") / "llama_mha")


class TestTokens:
    @pytest.mark.slow
    @pytest.mark.parametrize("window", [1, 2])
    def test_all_ranks_return_those_of_one(self, ranks: RankPool, model_dir, window):
        """
        Every rank returns the tokens, text and log probabilities of a model on one rank, for all
        kinds of requests together.
        """
        alone = on_ranks.served(None, model_dir)
        assert [alone] * 2 == ranks.run(2, on_ranks.served, model_dir, window=window)

    @pytest.mark.slow
    def test_four_ranks(self, ranks: RankPool, model_dir):
        """
        The world is taken where a size is given and no groups.
        """
        alone = on_ranks.served_few(None, model_dir)
        found = ranks.run(4, on_ranks.served_by_world, model_dir, tensor_model_parallel_size=4)
        assert [alone] * 4 == found

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
    def test_clocks_of_ranks_decide_nothing(self, ranks: RankPool, model_dir, mode):
        """
        With little memory, requests that are preempted, swapped, aged, aborted and suspended are
        planned alike on ranks whose clocks run differently.
        """
        alone = on_ranks.journey(None, model_dir, mode)
        assert [alone] * 2 == ranks.run(2, on_ranks.journey, model_dir, mode)

    @pytest.mark.slow
    def test_seed_is_drawn_once(self, ranks: RankPool, model_dir):
        """
        Requests without a seed have one of rank 0, a new one each time.
        """
        first, second = ranks.run(2, on_ranks.unseeded, model_dir)
        assert first == second
        assert first[0][0] != first[0][1]

    @pytest.mark.slow
    def test_ranks_have_the_same_limits_and_counts(self, ranks: RankPool, model_dir):
        """
        Ranks agree on limits that follow the free memory, and each can be asked by itself.
        """
        first, second = ranks.run(2, on_ranks.counts, model_dir)
        assert first == second


class TestRefusals:
    def test_size_of_another_group_is_refused(self, ranks: RankPool, model_dir):
        """
        A size that is not that of the group, or of the world, is refused on every rank.
        """
        found = ranks.run(2, on_ranks.refusal, model_dir, tensor_model_parallel_size=4)
        found += ranks.run(4, on_ranks.refusal_of_world, model_dir, tensor_model_parallel_size=2)
        assert all("tensor_model_parallel_size is 4, but the group" in text for text in found[:2])
        assert all("is 2, but the group of processes has 4" in text for text in found[2:])

    def test_several_runners_are_refused(self, ranks: RankPool, model_dir):
        """
        A rank has one runner.
        """
        texts = ranks.run(2, on_ranks.refusal, model_dir, data_parallel_size=2)
        assert all("one engine for each group" in text for text in texts)

    def test_ranks_with_other_arguments_are_refused(self, ranks: RankPool, model_dir):
        """
        All ranks name the one that differs.
        """
        first, second = ranks.run(2, on_ranks.refusal_of_others, model_dir)
        assert first == second
        assert "the engine's arguments" in first

    @pytest.mark.slow
    def test_groups_of_megatron_are_taken(self, ranks: RankPool, model_dir):
        """
        An object with tp and pp serves as pg_collection.
        """
        alone = on_ranks.served_few(None, model_dir)
        assert [alone] * 2 == ranks.run(2, on_ranks.megatron, model_dir)


class TestDifferences:
    def test_other_calls_end_the_engine_on_all_ranks(self, ranks: RankPool, model_dir):
        """
        Where ranks are asked for different things, no rank waits for another: each says what
        differs, and that its engine has ended.
        """
        for texts in ranks.run(2, on_ranks.differing, model_dir):
            assert "rank 1 made SUBMIT with other arguments" in texts[0]
            assert all("has stopped" in text for text in texts[1:])
            assert 3 == len(texts)

    @pytest.mark.parametrize("number", [0, 1])
    def test_step_of_one_rank_alone_ends_the_engine(self, ranks: RankPool, model_dir, number):
        """
        Where one rank makes a step and another one submits, neither waits for the other.
        """
        made = ["STEP" if rank == number else "SUBMIT" for rank in range(2)]
        wanted = f"rank 1 made {made[1]} and rank 0 {made[0]}"
        assert all(wanted in text for text in ranks.run(2, on_ranks.out_of_step, model_dir, number))

    @pytest.mark.parametrize(
        ("error", "kinds", "text"),
        [
            (
                RuntimeError("device is gone"),
                ["ExecutionError", "ExecutorLost", "RuntimeError"],
                "rank {} of the model cannot go on: device is gone",
            ),
            (OutOfMemory("no memory"), ["EngineMemoryError", "OutOfMemory"], "no memory"),
            (TypeError("a bug"), ["TypeError"], "a bug"),
            (NotImplementedError("a bug"), ["NotImplementedError"], "a bug"),
            (RecursionError("a bug"), ["RecursionError"], "a bug"),
        ],
    )
    def test_failed_step_ends_the_engine(self, ranks: RankPool, model_dir, error, kinds, text):
        """
        No step is computed again, as ranks could stop at different places; a bug stays what it is,
        and no error is its own cause.
        """
        for rank, told in enumerate(ranks.run(2, on_ranks.failing, model_dir, error)):
            (found, first), (_, second) = told
            assert kinds == found
            assert text.format(rank) in first
            assert f"rank {rank} of the model has stopped ({error})" in second
