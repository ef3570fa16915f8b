"""Log probabilities of prompt tokens: each once, before outputs, whatever happened meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import FeatureUnsupported, InvalidParameter, SessionLost, TotalTooLong
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import GREEDY, Rig, geometry_of, small_config

BOLD = CoreOptions(schedule_conservativeness=0.0)
"""Options that admit whatever fits now, so that blocks run out."""
CHUNKED = small_config(max_total_tokens=8)


def submit(rig: Rig, num_top: int | None, **changes) -> int:
    """Submit a request that asks for scores of its prompt with `num_top` ids; None: for none."""
    sampling = replace(changes.pop("sampling", GREEDY), prompt_logprobs=num_top)
    return rig.submit(sampling=sampling, **changes)


def check(rig: Rig) -> None:
    """Check that every request has the scores of its own prompt, and all its outputs."""
    for handle in rig.submitted:
        assert rig.expected_scores(handle) == rig.scores[handle], handle
        assert rig.expected(handle) == rig.outputs[handle], handle
    told = sum(len(scores) for scores in rig.scores.values())
    assert told == rig.core.stats().scored_prompt_tokens


@pytest.mark.parametrize("delay", [1, 2, 4])
class TestEveryPromptToken:
    def test_asking_and_not_asking_side_by_side(self, delay):
        """
        Each request gets the scores it asked for, whether its prompt is computed whole or in
        chunks, and one that did not ask gets none.
        """
        rig = Rig(CHUNKED, delay=delay)
        for num_top, prompt_len in ((0, 6), (None, 20), (3, 21), (20, 1), (None, 2), (1, 2)):
            submit(rig, num_top, prompt_len=prompt_len, max_tokens=5)
        rig.run()
        check(rig)
        assert [5, 0, 20, 0, 0, 1] == [len(rig.scores[handle]) for handle in range(6)]

    @pytest.mark.parametrize("mode", list(PreemptionMode))
    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_after_preemption(self, delay, mode, steps):
        """
        A request that loses its slot in the middle of its prompt, or after it, is told the rest
        and nothing twice.
        """
        config = small_config(max_total_tokens=8)
        rig = Rig(
            config,
            delay=delay,
            options=replace(BOLD, preemption_mode=mode),
            geometry=geometry_of(config, num_host_blocks=16),
        )
        for max_tokens in (6, 0):
            submit(rig, 2, prompt_len=19, max_tokens=max_tokens)
        for _ in range(steps):
            rig.step()
        for handle in list(rig.submitted):
            if handle not in rig.ended:
                rig.core.preempt(f"r{handle}")
        rig.run()
        assert rig.core.stats().preemptions > 0
        check(rig)

    @pytest.mark.parametrize("steps", [1, 2, 3, 5])
    def test_after_the_loss_of_the_executor(self, delay, steps):
        """
        Scores that another executor computes again are told once.
        """
        rig = Rig(CHUNKED, delay=delay)
        for max_tokens in (4, 0):
            submit(rig, 1, prompt_len=21, max_tokens=max_tokens)
        for _ in range(steps):
            rig.step()
        rig.lose_executor()
        rig.run()
        check(rig)

    @pytest.mark.parametrize("mode", list(KvMode))
    def test_after_a_suspension(self, delay, mode):
        """
        A prompt under way goes on after a suspension of any kind, and is told once.
        """
        rig = Rig(CHUNKED, delay=delay)
        submit(rig, 1, prompt_len=30, max_tokens=4)
        rig.step()
        rig.step()
        rig.core.suspend(mode, rig.now)
        for _ in range(8):
            rig.step()
        rig.core.resume()
        rig.run()
        check(rig)

    def test_nothing_is_read_from_the_prefix_cache(self, delay):
        """
        A prompt that is scored is computed from its first token on, and others share what it wrote;
        computed again after its scores were told, it shares what is cached.
        """
        rig = Rig(delay=delay)
        prompt = np.arange(24, dtype=np.int32)
        for num_top in (None, 1, None):
            submit(rig, num_top, prompt=prompt, max_tokens=2)
            rig.run()
        cached = [rig.ended[handle].num_cached_tokens for handle in range(3)]
        assert 0 == cached[1]
        assert 0 < cached[2]
        check(rig)

    def test_several_choices(self, delay):
        """
        One choice has the prompt scored for all, and none produces output before that.
        """
        rig = Rig(CHUNKED, delay=delay)
        submit(rig, 2, prompt_len=17, max_tokens=6, num_choices=3)
        for _ in range(2):
            rig.step()
        rig.lose_executor()
        rig.run()
        check(rig)
        assert [16, 0, 0] == [len(rig.scores[choice]) for choice in range(3)]

    def test_scores_go_with_the_first_choice_that_is_left(self, delay):
        """
        Where choice 0 has ended on another scheduler, the next one has the prompt scored.
        """
        rig = Rig(delay=delay)
        prior = tuple(np.empty(0, np.int32) for _ in range(3))
        submit(
            rig, 0, prompt_len=9, max_tokens=4, num_choices=3,
            prior_outputs=prior, finished_choices=frozenset({0}),
        )  # fmt: skip
        rig.run()
        assert [0, 8, 0] == [len(rig.scores[choice]) for choice in range(3)]

    def test_bad_row_takes_only_its_own(self, delay):
        """
        A row that fails alone is told nothing more; the others of its step are.
        """
        rig = Rig(CHUNKED, delay=delay)
        rig.poisons_next = True
        failing = submit(rig, 1, prompt_len=12, max_tokens=3)
        submit(rig, 1, prompt_len=9, max_tokens=3)
        rig.run()
        assert [failing] == list(rig.failed)
        assert [] == rig.scores[failing]
        assert rig.expected_scores(1) == rig.scores[1]


@pytest.mark.parametrize("delay", [1, 2, 4])
class TestScoringAlone:
    @pytest.mark.parametrize("prompt_len", [1, 2, 8, 9, 30])
    def test_ends_without_output(self, delay, prompt_len):
        """
        With max_tokens 0 a request ends by its length once its prompt is scored.
        """
        rig = Rig(CHUNKED, delay=delay)
        handle = submit(rig, 2, prompt_len=prompt_len, max_tokens=0)
        beside = rig.submit(prompt_len=5, max_tokens=12)
        rig.run()
        check(rig)
        end = rig.ended[handle]
        assert (FinishReason.MAX_TOKENS, 0, prompt_len, None) == (
            end.reason, end.num_output_tokens, end.num_prompt_tokens, end.first_token_s,
        )  # fmt: skip
        assert 12 == len(rig.outputs[beside])

    def test_prompt_may_fill_the_context(self, delay):
        """
        A prompt of max_model_len tokens has room for no output and can be scored.
        """
        config = small_config(max_model_len=32)
        rig = Rig(config, delay=delay)
        handle = submit(rig, 0, prompt_len=32, max_tokens=0)
        rig.run()
        check(rig)
        assert 31 == len(rig.scores[handle])
        with pytest.raises(TotalTooLong):
            submit(rig, 0, prompt_len=32, max_tokens=1)

    def test_cancelled_in_the_middle(self, delay):
        """
        A request that is ended from outside is told nothing more.
        """
        rig = Rig(CHUNKED, delay=delay)
        handle = submit(rig, 0, prompt_len=40, max_tokens=0)
        rig.step()
        rig.step()
        rig.core.end_handle(handle, FinishReason.CANCELLED, rig.now)
        rig.run()
        assert FinishReason.CANCELLED is rig.ended[handle].reason
        assert len(rig.scores[handle]) < 39


class TestRefusals:
    @pytest.mark.parametrize(
        ("max_tokens", "num_top", "num_choices"), [(0, None, 1), (0, 1, 2), (-1, 1, 1)]
    )
    def test_no_output_is_for_scores_of_one_choice(self, max_tokens, num_top, num_choices):
        """
        Max_tokens 0 needs prompt_logprobs and one choice.
        """
        rig = Rig()
        with pytest.raises(InvalidParameter) as error:
            submit(rig, num_top, max_tokens=max_tokens, num_choices=num_choices)
        assert "stopping.max_tokens" == error.value.field

    def test_logits_of_last_tokens_only_are_none_of_prompts(self):
        """
        Where only the logits of last tokens are materialized, a request for scores of its prompt is
        refused in Megatron Core's words, and one for those of its outputs is served.
        """
        rig = Rig(options=CoreOptions(materialize_only_last_token_logits=True))
        with pytest.raises(FeatureUnsupported) as error:
            submit(rig, 0, max_tokens=3)
        assert "response.prompt_logprobs" == error.value.field
        assert (
            "Prompt log probs cannot be calculated if only last token logits are materialized. Set "
            "materialize_only_last_token_logits to False in DynamicInferenceContext or "
            "skip_prompt_log_probs to True in SamplingParams."
        ) == error.value.message
        handle = submit(rig, None, sampling=replace(GREEDY, logprobs=1), max_tokens=3)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]

    @pytest.mark.parametrize("change", ["gap", "past the prompt", "first token", "out of order"])
    def test_scores_of_other_positions_end_the_session(self, change):
        """
        Scores that are not those of the next prompt tokens change nothing and end the session.
        """
        rig = Rig(delay=2)
        handle = submit(rig, 1, prompt_len=9, max_tokens=3)
        rig.step()
        result = rig.pending[0]
        position = result.prompt_logprobs.position
        moved = {
            "gap": position + 1,
            "past the prompt": np.append(position[:-1], np.int32(9)),
            "first token": position - 1,
            "out of order": position[::-1],
        }
        told = replace(result.prompt_logprobs, position=moved[change].astype(np.int32))
        with pytest.raises(SessionLost):
            rig.core.apply(replace(result, prompt_logprobs=told), rig.now)
        rig.run()
        assert rig.expected_scores(handle) == rig.scores[handle]
