"""The time that a step may take before it counts as late."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.link.batch import Batch
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.step_cost import (
    ALWAYS_ALLOWED_S,
    COMMAND_ALLOWED_S,
    LEARN_EVERY,
    LEARN_OVER_S,
    SLACK,
    StepCost,
    StepWork,
)


def batch(*rows: tuple[int, int]) -> Batch:
    """Return a batch with rows of (start, tokens)."""
    columns = np.array(rows, np.int32).reshape(-1, 2)
    return Batch(
        row_slot=np.arange(len(columns), dtype=np.int32),
        row_start=columns[:, 0],
        row_num_tokens=columns[:, 1],
    )


DECODES = batch(*[(1000, 1)] * 32)
PROMPT = batch((0, 4096))


class TestWork:
    def test_counts_tokens_and_what_they_attend_to(self):
        """
        A token at position p attends to p + 1 tokens, itself among them.
        """
        work = StepWork.of(batch((10, 1), (0, 3), (4, 2)))
        assert StepWork(6.0, 11.0 + (1 + 2 + 3) + (5 + 6)) == work

    def test_long_contexts_do_not_overflow(self):
        """
        Sums beyond 31 bits are exact.
        """
        work = StepWork.of(batch(*[(1_000_000, 4096)] * 8))
        assert 8 * (4096 * 1_000_000 + 4096 * 4097 // 2) == work.num_pairs


class TestCost:
    def test_nothing_known_allows_what_is_always_allowed(self):
        """
        A first step of any kind may take ten seconds.
        """
        assert ALWAYS_ALLOWED_S == StepCost().allowed_s(PROMPT)

    @pytest.mark.parametrize("work", [DECODES, PROMPT, batch((5000, 1), (0, 700))])
    @pytest.mark.parametrize("seconds", [0.002, 1.0, 7.0])
    def test_step_like_those_before_gets_the_slack_and_at_most_twice_it(self, work, seconds):
        """
        A step like those before it is predicted to take their time or up to twice that.
        """
        cost = StepCost()
        for _ in range(100):
            cost.learn(StepWork.of(work), seconds)
        assert seconds <= cost.predict_s(StepWork.of(work)) <= 2.01 * seconds
        assert max(ALWAYS_ALLOWED_S, SLACK * seconds) <= cost.allowed_s(work)

    def test_prompt_after_decodes_gets_time_for_its_tokens(self):
        """
        A prompt of 4,096 tokens after decodes of 32 rows is allowed at least its tokens at the decodes' pace.
        """
        cost = StepCost()
        for _ in range(50):
            cost.learn(StepWork.of(DECODES), 0.2)
        assert cost.allowed_s(PROMPT) >= SLACK * 0.2 * 4096 / 32

    def test_longer_context_gets_more_time(self):
        """
        The same number of tokens on a longer context is predicted to take longer.
        """
        cost = StepCost()
        for _ in range(50):
            cost.learn(StepWork.of(batch((0, 512))), 1.0)
        assert cost.allowed_s(batch((100_000, 512))) > 100 * cost.allowed_s(batch((0, 512)))

    def test_one_hiccup_changes_little(self):
        """
        A single slow step among many quick ones does not let a hung one pass for long.
        """
        cost = StepCost()
        for _ in range(200):
            cost.learn(StepWork.of(DECODES), 0.002)
        cost.learn(StepWork.of(DECODES), 5.0)
        assert cost.predict_s(StepWork.of(DECODES)) < 0.25

    def test_slower_machine_is_learned(self):
        """
        The latest steps decide the prediction.
        """
        cost = StepCost()
        for seconds in [0.01] * 200 + [1.0] * 200:
            cost.learn(StepWork.of(PROMPT), seconds)
        assert cost.predict_s(StepWork.of(PROMPT)) > 0.95

    def test_empty_batch_teaches_nothing(self):
        """
        A batch that only releases slots has no cost per token.
        """
        cost = StepCost()
        cost.learn(StepWork.of(batch()), 3.0)
        assert 0.0 == cost.predict_s(StepWork.of(PROMPT))

    def test_quick_steps_teach_now_and_then_and_slow_ones_always(self):
        """
        Of quick batches one in sixteen is learned from, of slow ones each, and of other steps none.
        """
        cost = StepCost()
        work = StepWork.of(PROMPT)
        for number in range(1, LEARN_EVERY):
            cost.learn_some(number, PROMPT, LEARN_OVER_S)
        cost.learn_some(LEARN_EVERY, Resume(), 3.0)
        assert 0.0 == cost.predict_s(work)
        cost.learn_some(LEARN_EVERY, PROMPT, LEARN_OVER_S)
        after_quick_s = cost.predict_s(work)
        assert after_quick_s > 0.0
        cost.learn_some(LEARN_EVERY + 1, PROMPT, 2 * LEARN_OVER_S)
        assert cost.predict_s(work) > after_quick_s

    @pytest.mark.parametrize("command", [Suspend(kv_mode=KvMode.OFFLOAD), Resume()])
    def test_moving_kv_memory_has_minutes(self, command):
        """
        A suspension or resumption, which moves KV memory, may take minutes.
        """
        assert COMMAND_ALLOWED_S == StepCost().allowed_s(command)
