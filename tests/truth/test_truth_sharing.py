"""KV blocks that are found, forked or copied give the same tokens as KV that is computed anew."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.model_zoo import FAMILIES
from tests.truth.equality import Comparison
from tests.truth.requests import GREEDY, NEIGHBOURS, SEEDED, TARGETS
from tests.truth.served import ALONE, SHARING, Served, compare, served_alone

NUM_CHOICES = 4
MODELS = [
    "llama_gqa_llama3_rope",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("mistral_window", "qwen2_window", "qwen3")
    ),
]
"""Models to test: sharing ignores the model, so one suffices; slow tests add windows and Qwen3."""


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request, tmp_path_factory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def alone(model_dir):
    """
    Return a function: the output of a request, or one choice of it, served alone and sharing
    nothing.
    """
    return served_alone(model_dir)


class TestSharedPrefixes:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("block_size", "prompt_len"),
        [
            (7, 37),
            (16, 32),
            *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 37), (7, 35), (16, 37))),
        ],
    )
    def test_a_cached_prompt_gives_the_same_tokens(self, model_dir, alone, block_size, prompt_len):
        """
        A prompt that is found whole or in part, its last block copied or not, gives the tokens of
        one that is computed, greedy and seeded.
        """
        comparison = Comparison()
        shared = Served(model_dir, SHARING, block_size=block_size, num_blocks=1024 // block_size)
        for name, target in TARGETS.items():
            request = replace(target, prompt=target.prompt[:prompt_len])
            expected = alone(request)
            for time in ("first", "again"):
                compare(comparison, expected, shared.serve(request), f"{name} {time}")
        whole = prompt_len // block_size * block_size
        found = min(whole, prompt_len - 1)
        assert [0, found, found, found] == shared.cached
        assert (3 if whole == prompt_len and block_size > 1 else 0) == shared.num_copies
        comparison.assert_not_vacuous()

    @pytest.mark.slow
    def test_a_conversation_goes_on_from_what_was_generated(self, model_dir, alone):
        """
        A second turn that finds the first one's prompt and answer gives the tokens of one that
        computes both.
        """
        comparison = Comparison()
        shared = Served(model_dir, SHARING)
        for name, target in TARGETS.items():
            answer = shared.serve(target).tokens
            prompt = (*target.prompt, *answer, *NEIGHBOURS[4].prompt)
            following = replace(target, prompt=prompt)
            compare(comparison, alone(following), shared.serve(following), name)
            assert shared.cached[-1] >= len(target.prompt) + len(answer) - 16
        comparison.assert_not_vacuous()

    @pytest.mark.slow
    def test_sharing_while_memory_runs_out_changes_no_token(self, model_dir, alone):
        """
        Requests with common prefixes that preempt each other and evict the cache get the tokens
        that they get alone.
        """
        comparison = Comparison()
        shared = Served(model_dir, SHARING, block_size=7, num_blocks=48)
        requests = [
            replace(target, prompt=target.prompt[:cut] + neighbour.prompt[:9])
            for (cut, target), neighbour in zip(
                itertools.product((35, 21, 14), TARGETS.values()), NEIGHBOURS[2:], strict=True
            )
        ]
        handles = [shared.submit(request) for request in requests]
        found = shared.run()
        for handle, request in zip(handles, requests, strict=True):
            compare(comparison, alone(request), found[handle], f"{handle}")
        stats = shared.core.stats()
        assert stats.preemptions > 0
        assert stats.prefix_cache_hit_tokens > 0
        comparison.assert_not_vacuous()


class TestForks:
    @pytest.mark.slow
    @pytest.mark.parametrize("options", [SHARING, ALONE], ids=["caching", "no-caching"])
    @pytest.mark.parametrize(
        ("block_size", "prompt_len"),
        [
            (7, 37),
            pytest.param(16, 32, marks=pytest.mark.slow),
            pytest.param(16, 33, marks=pytest.mark.slow),
        ],
    )
    def test_every_choice_gives_the_tokens_it_gives_alone(
        self, model_dir, alone, options, block_size, prompt_len
    ):
        """
        Choices that fork one prompt sample the tokens that each samples alone, whatever block the
        prompt ends in.
        """
        comparison = Comparison()
        forked = Served(model_dir, options, block_size=block_size)
        request = replace(SEEDED, prompt=SEEDED.prompt[:prompt_len])
        first = forked.submit(request, num_choices=NUM_CHOICES)
        found = forked.run()
        for choice in range(NUM_CHOICES):
            expected = alone(request, choice)
            compare(comparison, expected, found[first + choice], f"choice {choice}")
        assert [0, *[prompt_len - 1] * (NUM_CHOICES - 1)] == forked.cached
        assert len({tuple(found[first + choice].tokens) for choice in range(NUM_CHOICES)}) > 1
        comparison.assert_not_vacuous()

    def test_preempted_choices_and_neighbours_change_no_token(self, model_dir, alone):
        """
        Choices that lose their slots, among requests that share nothing with them, sample the
        tokens that each samples alone.
        """
        comparison = Comparison()
        forked = Served(model_dir, SHARING, block_size=7)
        first = forked.submit(SEEDED, num_choices=NUM_CHOICES)
        forked.submit(GREEDY)
        for neighbour in NEIGHBOURS[:2]:
            forked.submit(neighbour)
        for _ in range(20):
            forked.step()
        forked.core.preempt(str(first))
        found = forked.run()
        for choice in range(NUM_CHOICES):
            expected = alone(SEEDED, choice)
            compare(comparison, expected, found[first + choice], f"choice {choice}")
        comparison.assert_not_vacuous()
