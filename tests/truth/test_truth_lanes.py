"""Lanes for stages give the same tokens as one lane: requests in any of them are as if alone."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler_svc.core.request.options import CoreOptions, VictimRule
from tests.model_zoo import FAMILIES
from tests.truth.equality import Comparison
from tests.truth.requests import (
    NEIGHBOURS,
    PENALISED,
    PENALISED_NEIGHBOURS,
    SEEDED,
    TARGETS,
    TruthRequest,
)
from tests.truth.test_truth_sharing import ALONE, NUM_CHOICES, SHARING, Output, Served, compare

STAGES = pytest.mark.parametrize("num_stages", [2, 4])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return FAMILIES["llama_gqa_llama3_rope"](tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def alone(model_dir):
    """
    Return a function: the output of a request, or one choice of it, served alone.
    """
    served = Served(model_dir, ALONE)

    @cache
    def expected(request: TruthRequest, choice: int = 0) -> Output:
        return served.serve(request, choice=choice)

    return expected


def serve_all(served: Served, requests, alone) -> None:
    """Serve requests together, with all lanes in flight, and compare each with itself alone."""
    comparison = Comparison()
    handles = [served.submit(request) for request in requests]
    found = served.run(in_depth=True)
    for handle, request in zip(handles, requests, strict=True):
        compare(comparison, alone(request), found[handle], f"{handle}")
    comparison.assert_not_vacuous()


def num_in_common(served: Served) -> int:
    """Return how many decodes are in two steps in a row."""
    decodes = [set(b.row_slot[b.row_num_tokens == 1].tolist()) for b in served.batches]
    return sum(len(one & other) for one, other in pairwise(decodes))


class TestLanes:
    @pytest.mark.slow
    @STAGES
    def test_requests_of_all_lanes_get_their_tokens(self, model_dir, alone, num_stages):
        """
        Greedy and seeded requests, with prompts in chunks, get the tokens that they get alone, and
        while there are several lanes no decode is in two steps in a row.
        """
        served = Served(model_dir, SHARING, num_stages=num_stages)
        serve_all(served, [*TARGETS.values(), *NEIGHBOURS[:6]], alone)
        num_decodes = sum(len(batch.row_slot) for batch in served.batches)
        assert num_in_common(served) < num_decodes / 4

    @pytest.mark.slow
    @STAGES
    def test_penalties_count_the_tokens_of_other_lanes_turns(self, model_dir, alone, num_stages):
        """
        Penalties, bans and log probabilities are those of the request's own history.
        """
        served = Served(model_dir, SHARING, num_stages=num_stages)
        serve_all(served, [*PENALISED.values(), *PENALISED_NEIGHBOURS[:5]], alone)

    @pytest.mark.slow
    @STAGES
    @pytest.mark.parametrize("rule", [VictimRule.FEWEST_GENERATED, VictimRule.PAUSED_BUDGET])
    def test_want_of_blocks_changes_no_token(self, model_dir, alone, num_stages, rule):
        """
        Requests that preempt each other or pause get the tokens that they get alone.
        """
        options = CoreOptions(
            schedule_conservativeness=0.0, victim_rule=rule, paused_budget_blocks=8
        )
        served = Served(model_dir, options, block_size=7, num_blocks=48, num_stages=num_stages)
        serve_all(served, [*TARGETS.values(), *NEIGHBOURS[2:6]], alone)

    @pytest.mark.slow
    @STAGES
    def test_choices_share_their_prompt(self, model_dir, alone, num_stages):
        """
        Choices in different lanes share the prompt that one computes.
        """
        comparison = Comparison()
        served = Served(model_dir, SHARING, block_size=7, num_stages=num_stages)
        first = served.submit(SEEDED, num_choices=NUM_CHOICES)
        found = served.run(in_depth=True)
        for choice in range(NUM_CHOICES):
            compare(comparison, alone(SEEDED, choice), found[first + choice], f"choice {choice}")
        assert [0, *[len(SEEDED.prompt) - 1] * (NUM_CHOICES - 1)] == served.cached
        comparison.assert_not_vacuous()
