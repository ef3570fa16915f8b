"""Lanes for stages give the same tokens as one lane: requests in any of them are as if alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from scheduler_svc.core.request.options import CoreOptions, VictimRule
from tests.model_zoo import FAMILIES
from tests.truth.equality import Comparison
from tests.truth.requests import NEIGHBOURS, PENALISED, PENALISED_NEIGHBOURS, SEEDED, TARGETS
from tests.truth.served import SHARING, Served, compare, served_alone

NUM_CHOICES = 4
STAGES = pytest.mark.parametrize("num_stages", [2, 4])
MOSTLY_SLOW = pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 4])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return FAMILIES["llama_gqa_llama3_rope"](tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def alone(model_dir):
    """
    Return a function: the output of a request, or one choice of it, served alone.
    """
    return served_alone(model_dir)


def serve_all(served: Served, requests, alone) -> None:
    """Serve requests together, with all lanes in flight, and compare each with itself alone."""
    comparison = Comparison()
    handles = [served.submit(request) for request in requests]
    found = served.run(in_depth=True)
    for handle, request in zip(handles, requests, strict=True):
        expected = alone(request)
        compare(comparison, expected, found[handle], f"{handle}")
        asked = 0 if request.logprobs is None else len(expected.tokens)
        assert asked == len(expected.logprobs)
    comparison.assert_not_vacuous()


def num_in_common(served: Served) -> int:
    """Return how many decodes are in two steps in a row."""
    decodes = [set(b.row_slot[b.row_num_tokens == 1].tolist()) for b in served.batches]
    return sum(len(one & other) for one, other in pairwise(decodes))


class TestLanes:
    @MOSTLY_SLOW
    def test_requests_of_all_lanes_get_their_tokens(self, model_dir, alone, num_stages):
        """
        Greedy and seeded requests, with prompts in chunks, get the tokens that they get alone, and
        no decode is in two steps in a row: two lanes or more have requests until the end.
        """
        served = Served(model_dir, SHARING, num_stages=num_stages)
        serve_all(served, [*TARGETS.values(), *NEIGHBOURS[:6]], alone)
        assert 0 == num_in_common(served)

    @pytest.mark.slow
    @STAGES
    def test_penalties_count_the_tokens_of_other_lanes_turns(self, model_dir, alone, num_stages):
        """
        Penalties, bans and log probabilities are those of the request's own history: with the
        others' tokens between them, requests get what they get alone.
        """
        served = Served(model_dir, SHARING, num_stages=num_stages)
        serve_all(served, [*PENALISED.values(), *PENALISED_NEIGHBOURS[:5]], alone)

    @pytest.mark.slow
    @STAGES
    @pytest.mark.parametrize("rule", [VictimRule.FEWEST_GENERATED, VictimRule.PAUSED_BUDGET])
    def test_want_of_blocks_changes_no_token(self, model_dir, alone, num_stages, rule):
        """
        Requests that preempt each other, and with a budget pause first, get the tokens that they
        get alone.
        """
        options = CoreOptions(
            schedule_conservativeness=0.0, victim_rule=rule, paused_budget_blocks=8
        )
        served = Served(model_dir, options, block_size=7, num_blocks=48, num_stages=num_stages)
        serve_all(served, [*TARGETS.values(), *NEIGHBOURS[2:6]], alone)
        assert served.core.stats().preemptions > 0
        assert (served.most_paused_blocks > 0) == (rule is VictimRule.PAUSED_BUDGET)

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
