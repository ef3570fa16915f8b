"""Requests that come with outputs of a scheduler that is gone."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, Overlength
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import InvalidParameter, NeverFits, QueueFull, TotalTooLong
from tandem.link.batch import Int32Column
from tests.scheduler_svc.core.fake_executor import expected_outputs
from tests.scheduler_svc.core.harness import GREEDY, Rig, small_config

PROMPT = np.arange(5, dtype=np.int32)
WHOLE = expected_outputs(PROMPT, 12, frozenset())


def column(tokens) -> Int32Column:
    """Return token ids as a column."""
    return np.array(tokens, np.int32)


def resume(rig: Rig, *num_known: int, **changes) -> int:
    """Submit a request of which so many output tokens of each choice are known already."""
    prior = tuple(
        column(expected_outputs(PROMPT, count, frozenset(), choice=choice) if count else [])
        for choice, count in enumerate(num_known)
    )
    fields = {"prompt": PROMPT, "max_tokens": 12, "num_choices": len(num_known)}
    return rig.submit(**fields | {"prior_outputs": prior} | changes)


class TestGoingOn:
    @pytest.mark.parametrize("delay", [1, 2, 4, 8])
    @pytest.mark.parametrize("num_known", [0, 1, 7, 11])
    def test_output_goes_on_after_what_is_known(self, delay, num_known):
        """
        The tokens after those known are produced once, at the offsets after them, and no other.
        """
        rig = Rig(delay=delay)
        handle = resume(rig, num_known)
        rig.run()
        assert WHOLE == rig.outputs[handle]
        assert 12 - num_known == len(rig.token_times[handle])

    def test_all_outputs_count_and_none_as_prompt(self):
        """
        Usage counts the tokens of both lives as output and only the prompt as prompt.
        """
        rig = Rig()
        handle = resume(rig, 7)
        rig.run()
        end = rig.ended[handle]
        assert (5, 12, FinishReason.MAX_TOKENS) == (
            end.num_prompt_tokens,
            end.num_output_tokens,
            end.reason,
        )
        assert 5 == rig.core.stats().output_tokens

    def test_they_count_as_known_while_it_waits(self):
        """
        Outputs, lists and memory of a request that waits include what it came with.
        """
        rig = Rig()
        handle = resume(rig, 7)
        assert WHOLE[:7] == rig.core.outputs(handle)
        assert [7] == [row.num_output_tokens for row in rig.core.list_requests()]
        rig.plan()
        assert 12 == rig.core._replica.slots.admitted.known_len[0]
        rig.run()

    def test_the_first_new_token_is_the_first(self):
        """
        The time to the first token is that of the first new one, and no gap is counted before it.
        """
        rig = Rig()
        handle = resume(rig, 7)
        rig.run()
        stats = rig.core.stats()
        assert rig.token_times[handle][0] == rig.ended[handle].first_token_s
        assert (1, 4) == (stats.first_tokens, stats.next_tokens)
        assert 4.0 == stats.inter_token_s

    @pytest.mark.parametrize("delay", [1, 4])
    def test_a_preemption_before_the_first_new_token_changes_no_time(self, delay):
        """
        A request that loses its slot before its first new token has no token to measure a gap from.
        """
        rig = Rig(small_config(max_total_tokens=4), delay=delay)
        handle = resume(rig, 7)
        rig.step()
        rig.core.preempt("r0")
        rig.run()
        assert WHOLE == rig.outputs[handle]
        assert 4.0 == rig.core.stats().inter_token_s

    def test_a_conversation_s_cache_is_found(self):
        """
        KV of prompt and outputs together is found where another request computed the same tokens.
        """
        rig = Rig()
        rig.submit(prompt=column([*PROMPT, *WHOLE[:7]]), max_tokens=1)
        rig.run()
        handle = resume(rig, 7)
        assert 11 == rig.plan().admits[0].num_cached_tokens
        rig.run()
        assert 5 == rig.ended[handle].num_cached_tokens


class TestOver:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"eos_token_ids": frozenset({WHOLE[2]})}, FinishReason.EOS),
            ({"stop_token_ids": frozenset({WHOLE[2]})}, FinishReason.STOP_TOKEN),
            ({"max_tokens": 3}, FinishReason.MAX_TOKENS),
            ({"max_tokens": 3, "fills_context": True}, FinishReason.CONTEXT_LIMIT),
        ],
        ids=["eos", "stop", "max_tokens", "context"],
    )
    def test_what_ends_with_its_last_known_token_ends_at_once(self, changes, reason):
        """
        A request of which only the end had not arrived ends with its reason and computes nothing.
        """
        rig = Rig()
        handle = resume(rig, 3, **changes)
        rig.collect()
        end = rig.ended[handle]
        assert (reason, 3, None) == (end.reason, end.num_output_tokens, end.first_token_s)
        assert not rig.core.has_pending_work()
        assert rig.core.schedule(rig.now) is None

    def test_the_others_of_its_choices_go_on(self):
        """
        A choice that is over ends alone.
        """
        rig = Rig()
        handle = resume(rig, 12, 3)
        rig.collect()
        assert {handle} == set(rig.ended)
        rig.run()
        assert rig.expected(handle + 1) == rig.outputs[handle + 1]


class TestChoices:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("known", [(3, 0, 9), (0, 5, 1), (4, 4, 4)])
    def test_each_goes_on_from_its_own(self, delay, known):
        """
        Choices that had come to different lengths share their prompt's KV and nothing else.
        """
        rig = Rig(delay=delay)
        first = resume(rig, *known)
        rig.run()
        for handle in range(first, first + 3):
            assert rig.expected(handle) == rig.outputs[handle]
        prompts = [
            int(batch.row_num_tokens[batch.row_start < 4].sum())
            for batch in rig.batches
            if len(batch.row_slot)
        ]
        assert 4 <= sum(prompts) < 12 + 5

    def test_finished_ones_are_not_produced(self):
        """
        A choice that had ended is neither computed nor told; the others keep handle and choice.
        """
        rig = Rig()
        first = resume(rig, 12, 2, 0, finished_choices=frozenset({0}))
        assert 2 == rig.core.num_requests
        assert [1, 2] == [row.choice for row in rig.core.list_requests()]
        rig.run()
        assert {first + 1, first + 2} == set(rig.ended)
        for handle in (first + 1, first + 2):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_only_live_ones_count_against_limits(self):
        """
        Limits on requests count the choices that are produced.
        """
        rig = Rig(options=CoreOptions(max_queued_requests=1))
        resume(rig, 12, 2, finished_choices=frozenset({0}))
        with pytest.raises(QueueFull):
            resume(rig, 12, 2, finished_choices=frozenset({0}))
        with pytest.raises(NeverFits):
            resume(rig, 12, 2, 0, finished_choices=frozenset({0}))

    def test_what_is_to_be_computed_counts_as_queued(self):
        """
        Queued tokens are the prompt once and each choice's known outputs.
        """
        rig = Rig()
        resume(rig, 7, 3, 0)
        assert 5 + 7 + 3 + 1 == rig.core.stats().queued_tokens
        rig.run()


class TestRefused:
    def refused(self, error, rig: Rig | None = None, *known: int, **changes) -> None:
        rig = rig or Rig()
        with pytest.raises(error) as refusal:
            resume(rig, *known, **changes)
        assert "resume.choices" == refusal.value.field
        assert 0 == rig.core.num_requests

    def test_more_than_max_tokens(self):
        """
        Prior outputs longer than max_tokens are refused, as they cannot be this request's.
        """
        self.refused(InvalidParameter, None, 9, max_tokens=8)

    @pytest.mark.parametrize("kind", ["eos_token_ids", "stop_token_ids"])
    def test_an_end_before_the_last_token(self, kind):
        """
        Prior outputs that go on past an end are refused, as the choice had ended there.
        """
        self.refused(InvalidParameter, None, 5, **{kind: frozenset({WHOLE[2]})})

    def test_columns_of_other_choices(self):
        """
        Prior outputs that are not one column for each choice are refused.
        """
        self.refused(InvalidParameter, None, 5, 5, num_choices=3)

    @pytest.mark.parametrize("finished", [{0, 1}, {2}])
    def test_finished_choices_that_make_no_sense(self, finished):
        """
        Finished choices that leave none to produce, or that the request does not have, are refused.
        """
        self.refused(InvalidParameter, None, 5, 5, finished_choices=frozenset(finished))

    def test_a_shorter_context_than_before(self):
        """
        Outputs that are longer than the context allows here are refused, also where max_tokens
        would be lowered; those that just fill it end by it.
        """
        options = CoreOptions(overlength=Overlength.TRUNCATE)
        config = small_config(max_model_len=12)
        self.refused(TotalTooLong, Rig(config, options=options), 8)
        rig = Rig(config, options=options)
        new = NewRequest(
            request_id="r", handle=0, prompt=PROMPT, sampling=GREEDY, max_tokens=12,
            arrival_s=0.0, prior_outputs=(column(WHOLE[:7]),),
        )  # fmt: skip
        rig.core.submit(new, 0.0)
        (end,) = rig.core.take_events().ended
        assert FinishReason.CONTEXT_LIMIT == end.reason
