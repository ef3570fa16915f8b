"""One engine whose model has its layers in several stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import model_zoo
from tests.clients.embedded.parallel import on_ranks
from tests.executor_svc.parallel.rank_pool import STAGES, RankPool

RANKS_OF_STAGES = pytest.mark.parametrize("sizes", STAGES, ids="tp{0[0]}-pp{0[1]}".format)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """Llama with three layers: two stages have different shares, and three have one between."""
    directory = tmp_path_factory.mktemp("three")
    return model_zoo._write("three", "Llama", directory, num_hidden_layers=3)


@pytest.fixture(scope="module")
def alone(model_dir):
    return on_ranks.served_few(None, model_dir)


class TestTokens:
    @pytest.mark.slow
    @RANKS_OF_STAGES
    def test_all_ranks_return_those_of_one(self, ranks: RankPool, model_dir, alone, sizes):
        """
        Every rank of every stage returns the tokens, text and log probabilities, also of prompts,
        of a model on one rank, for all kinds of requests together.
        """
        found = ranks.run_stages(sizes, on_ranks.served_few, model_dir)
        assert [alone] * len(found) == found

    def test_window_of_several_steps(self, ranks: RankPool, model_dir, alone):
        """
        More steps under way change nothing.
        """
        assert [alone] * 2 == ranks.run_stages((1, 2), on_ranks.served_few, model_dir, window=2)

    @pytest.mark.slow
    def test_world_is_divided_into_stages(self, ranks: RankPool, model_dir, alone):
        """
        The world is taken where sizes are given and no groups.
        """
        sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
        found = ranks.run(4, on_ranks.served_by_world, model_dir, **sizes)
        assert [alone] * 4 == found

    @pytest.mark.slow
    def test_groups_of_megatron_are_taken(self, ranks: RankPool, model_dir, alone):
        """
        An object with the groups tp, pp and mp serves as pg_collection.
        """
        found = ranks.run_stages((2, 2), on_ranks.megatron, model_dir)
        assert [alone] * 4 == found

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
    def test_requests_are_preempted_swapped_and_suspended(self, ranks: RankPool, model_dir, mode):
        """
        With little memory, requests that are preempted, swapped, aged, aborted and suspended, with
        steps under way, are planned alike on stages whose clocks run differently.
        """
        expected = on_ranks.journey(None, model_dir, mode)
        assert [expected] * 2 == ranks.run_stages((1, 2), on_ranks.journey, model_dir, mode)

    def test_ranks_have_the_same_limits_and_counts(self, ranks: RankPool, model_dir):
        """
        Stages of different size agree on limits that follow the free memory.
        """
        first, *others = ranks.run_stages((1, 2), on_ranks.counts, model_dir)
        assert [first] == others


class TestSteps:
    @pytest.mark.slow
    @pytest.mark.parametrize("window", [1, 2])
    def test_each_stage_has_steps_under_way(self, ranks: RankPool, model_dir, window):
        """
        With many requests `window` steps of each of two lanes are planned before the first is
        applied; one request alone has one lane. The engine may be closed meanwhile.
        """
        found = ranks.run_stages((1, 2), on_ranks.most_under_way, model_dir, window)
        # The oldest of them is applied before `step` returns.
        assert [[2 * window - 1, window - 1, 2 * window - 1]] * 2 == found


class TestRefusals:
    def test_sizes_of_other_groups_are_refused(self, ranks: RankPool, model_dir):
        """
        Sizes that are not those of the groups, or of the world, are refused on every rank.
        """
        stages = {"pipeline_model_parallel_size": 3}
        found = ranks.run_stages((1, 2), on_ranks.refusal, model_dir, **stages)
        assert all("parallel_size is 3, but the group of processes has 2" in one for one in found)
        found = ranks.run(4, on_ranks.refusal_of_world, model_dir, **stages)
        assert all("parallel_size is 3, but the group of processes has 4" in one for one in found)

    def test_groups_that_do_not_fit_each_other_are_refused(self, ranks: RankPool, model_dir):
        """
        Where the ranks of stages have no group in common, the error says which one to give.
        """
        found = ranks.run_stages((2, 2), on_ranks.refusal_of_part, model_dir)
        assert all("the group mp of pg_collection" in text for text in found)

    def test_groups_in_another_order_are_refused_on_all_ranks(self, ranks: RankPool, model_dir):
        """
        Where neighbours are of different stages, ranks that have the right place all the same are
        refused with the others, instead of waiting for them.
        """
        found = ranks.run_stages((2, 2), on_ranks.refusal_of_transposed, model_dir)
        assert all("those of a stage next to each other" in text for text in found)

    def test_ranks_with_other_arguments_are_refused(self, ranks: RankPool, model_dir):
        """
        All stages name the one that differs.
        """
        first, second = ranks.run_stages((1, 2), on_ranks.refusal_of_others, model_dir)
        assert first == second
        assert "the engine's arguments" in first


class TestDifferences:
    def test_other_calls_end_the_engine_on_all_stages(self, ranks: RankPool, model_dir):
        """
        Where stages are asked for different things, each says what differs.
        """
        for texts in ranks.run_stages((1, 2), on_ranks.differing, model_dir):
            assert "rank 1 made SUBMIT with other arguments" in texts[0]
            assert all("has stopped" in text for text in texts[1:])
            assert 3 == len(texts)

    @pytest.mark.parametrize("number", [0, 1])
    def test_step_of_one_stage_alone_ends_the_engine(self, ranks: RankPool, model_dir, number):
        """
        Where one stage makes a step and another one submits, neither waits for the other.
        """
        for text in ranks.run_stages((1, 2), on_ranks.out_of_step, model_dir, number):
            assert "must make the same calls in the same order" in text

    def test_failed_step_ends_the_engine(self, ranks: RankPool, model_dir):
        """
        A step that cannot be begun ends the engine at once, though its result is not due.
        """
        error = RuntimeError("device is gone")
        for rank, told in enumerate(ranks.run_stages((1, 2), on_ranks.failing, model_dir, error)):
            (_, first), (_, second) = told
            assert f"rank {rank} of the model cannot go on: device is gone" in first
            assert f"rank {rank} of the model has stopped (device is gone)" in second
