"""Steps that the executor has no memory for: they become smaller, and at last a request fails."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler_svc.core.faults.out_of_memory import FAILS_AT, SMALL_STEP_TOKENS
from scheduler_svc.core.request.options import CoreOptions, StepPriority
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.state.step_room import FIRST_PATIENCE_STEPS, SOON_STEPS, StepRoom
from tandem.errors import OutOfMemory
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import Rig, context_of, small_config

BOLD = CoreOptions(schedule_conservativeness=0.0, track_request_events=True)
WIDE = small_config(
    max_num_blocks=512, max_batch_size=16, max_total_tokens=64, max_model_len=256
)  # fmt: skip


def rig_with(count: int, *, max_tokens: int = 30, delay: int = 1) -> Rig:
    """Return a rig with `count` requests that all run at once."""
    rig = Rig(WIDE, options=BOLD, delay=delay, checked=False)
    for _ in range(count):
        rig.submit(prompt_len=6, max_tokens=max_tokens)
    return rig


def handles_in(rig: Rig, batch) -> set[int]:
    """Return the handles of the rows in a step that is being sent."""
    return set(rig.core._replica.slots.admitted.handle[batch.row_slot].tolist())


def assert_only_failed(rig: Rig, failed: set[int]) -> None:
    """Check that these fail for want of memory and that all others have every token."""
    assert failed == set(rig.failed)
    assert all(isinstance(rig.failed[handle].error, OutOfMemory) for handle in failed)
    for handle in rig.submitted.keys() - failed:
        assert rig.expected(handle) == rig.outputs[handle]


class TestTooMuchTogether:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize(
        "fits",
        [
            lambda batch: context_of(batch) <= 150,
            lambda batch: len(batch.row_slot) <= 5,
            lambda batch: batch.num_tokens <= 20,
        ],
        ids=["context", "rows", "tokens"],
    )
    def test_costs_a_failure_per_halving_and_no_request(self, fits, delay):
        """
        Requests that fit one by one but not together all finish, after no more failures than it
        takes to halve the step until it fits.
        """
        rig = rig_with(16, delay=delay)
        rig.fits = fits
        rig.run()
        assert_only_failed(rig, set())
        assert 1 <= rig.num_out_of_memory <= 4
        assert not rig.core._cell.suspects.has_marks

    def test_running_requests_are_as_many_as_fitted(self):
        """
        Eight decodes run at a time after a step of sixteen failed, and the operator is told.
        """
        rig = rig_with(16)
        rig.fits = lambda batch: len(batch.row_slot) < 16 or batch.num_tokens > 16
        while not rig.num_out_of_memory:
            rig.step()
        rig.batches.clear()
        rig.run()
        assert 8 == max(len(batch.row_slot) for batch in rig.batches)
        assert any(
            "16 rows and 16 tokens: the next 1024 steps have at most 8 rows and 64 tokens"
            in line.text
            for line in rig.log_lines
        )


class TestTooMuchAlone:
    def test_a_request_that_outgrows_the_memory_fails_and_no_other_does(self):
        """
        A request that outgrows the memory for steps fails as OUT_OF_MEMORY, after as many failures
        as there are halvings down to it alone and a few more; all others finish.
        """
        rig = rig_with(16)
        grows = rig.submit(prompt_len=6, max_tokens=200)
        rig.fits = lambda batch: context_of(batch) <= 150
        rig.run()
        assert_only_failed(rig, {grows})
        assert rig.num_out_of_memory <= 4 + FAILS_AT

    def test_getting_on_in_between_does_not_help_it(self):
        """
        A request fails at its third step alone that runs out of memory, however many tokens it
        produced between them.
        """
        rig = rig_with(1, max_tokens=200)
        lengths = []

        def fits(batch) -> bool:
            if context_of(batch) < 40 + 30 * len(lengths):
                return True
            lengths.append(len(rig.outputs[0]))
            return False

        rig.fits = fits
        rig.run()
        assert_only_failed(rig, {0})
        assert FAILS_AT == len(lengths) == rig.num_out_of_memory
        assert all(later - sooner >= 20 for sooner, later in pairwise(lengths))

    def test_error_says_what_to_do(self):
        """
        The error says how long the request was, and that operators can make room.
        """
        rig = rig_with(1, max_tokens=200)
        rig.fits = lambda batch: context_of(batch) <= 100
        rig.run()
        message = rig.failed[0].error.message
        assert "3 times in small steps of request r0 alone, at last with 101 tokens" in message
        assert "give the KV cache less memory" in message

    def test_others_run_together_again_once_it_is_gone(self):
        """
        Steps grow within some dozens of steps once the request that did not fit has failed.
        """
        rig = rig_with(16, max_tokens=100)
        rig.fits = lambda batch: 0 not in handles_in(rig, batch)
        while 0 not in rig.failed:
            rig.step()
        rig.batches.clear()
        for _ in range(6 * SOON_STEPS):
            rig.step()
        assert 15 == max(len(batch.row_slot) for batch in rig.batches)
        rig.run()
        assert_only_failed(rig, {0})

    def test_choice_that_ended_meanwhile_fails_nobody(self):
        """
        A failed step counts against no request when its only one has ended by then.
        """
        rig = rig_with(1, delay=2)
        rig.fits = lambda batch: not len(batch.row_slot)
        rig.plan()
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.run()
        assert ({0}, {}) == (set(rig.ended), rig.failed)


class TestLargeSteps:
    def test_prompt_is_computed_in_as_many_steps_as_it_takes(self):
        """
        A long prompt alone does not fail when its chunks are too large: they are halved until they
        fit.
        """
        config = small_config(max_num_blocks=512, max_total_tokens=1024, max_model_len=1000)
        rig = Rig(config, options=BOLD, checked=False)
        rig.submit(prompt_len=900, max_tokens=5)
        rig.fits = lambda batch: batch.num_tokens <= 2 * SMALL_STEP_TOKENS // 3
        rig.run()
        assert_only_failed(rig, set())
        assert FAILS_AT < rig.num_out_of_memory

    def test_decodes_keep_their_share_of_smaller_steps(self):
        """
        Prompts that go first leave decodes the same share of a step, however small it is.
        """
        options = replace(BOLD, step_priority=StepPriority.PREFILL_FIRST, max_prefill_share=0.5)
        rig = Rig(WIDE, options=options, checked=False)
        rig.core._replica.room.note_failure(8, 32, 0)
        for _ in range(3):
            rig.submit(prompt_len=6, max_tokens=40)
        while len(rig.outputs) < 3:
            rig.step()
        rig.submit(prompt_len=100, max_tokens=4)
        assert [[1, 1, 1, 8]] * 5 == [rig.step().row_num_tokens.tolist() for _ in range(5)]
        rig.run()

    def test_command_without_rows_leaves_steps_as_they_are(self):
        """
        An executor that runs out of memory in a suspension has not died, and steps stay as large.
        """
        rig = rig_with(2)
        rig.step()
        rig.core.suspend(KvMode.PERSIST, rig.now)
        rig.plan()
        rig.lose_executor(0, out_of_memory=True)
        rig.core.resume()
        assert (None, 0) == (rig.core._replica.room.max_rows, rig.core.stats().executor_deaths)
        rig.run()
        assert_only_failed(rig, set())


class TestRoom:
    def test_prompts_halve_tokens_and_rows(self):
        """
        A failed step with prompts halves rows and tokens; one of decodes leaves the tokens as they
        are.
        """
        room = StepRoom()
        room.note_failure(6, 100, 0)
        assert (3, 50) == (room.rows(64), room.tokens(4096))
        room.note_failure(3, 3, 0)
        assert (1, 50) == (room.rows(64), room.tokens(4096))
        room.note_failure(1, 1, 0)
        assert (1, 50) == (room.rows(64), room.tokens(4096))

    def test_each_row_has_a_token(self):
        """
        Steps never have fewer tokens than rows, nor less than one.
        """
        room = StepRoom()
        for num_tokens in (5, 2, 2):
            room.note_failure(1, num_tokens, 0)
        assert (1, 1) == (room.rows(8), room.tokens(8))

    def test_limits_stay_what_they_are(self):
        """
        Room is never more than an executor's limits, which may shrink meanwhile.
        """
        room = StepRoom()
        room.note_failure(64, 64, 0)
        assert (32, 8) == (room.rows(64), room.rows(8))
        assert not room.advance(FIRST_PATIENCE_STEPS - 1, 64, 64)
        assert room.advance(FIRST_PATIENCE_STEPS, 64, 64)
        assert room.max_rows is None

    def test_failures_that_are_long_past_do_not_count(self):
        """
        A failure after full steps have fitted for long keeps steps small for as long as the first.
        """
        room, now = StepRoom(), 0
        for _ in range(40):
            room.note_failure(64, 64, now)
            assert FIRST_PATIENCE_STEPS == room.patience_steps
            now += FIRST_PATIENCE_STEPS
            assert room.advance(now, 64, 64)
            now += FIRST_PATIENCE_STEPS

    def test_patience_doubles_and_ends_only_with_full_steps(self):
        """
        A failure that follows another doubles the wait, and room stays noted until rows and tokens are both whole.
        """
        room = StepRoom()
        room.note_failure(64, 4096, 0)
        room.note_failure(32, 2048, 10)
        assert 2 * FIRST_PATIENCE_STEPS == room.patience_steps
        assert (16, 1024) == (room.rows(64), room.tokens(4096))
        assert room.advance(10 + 2 * FIRST_PATIENCE_STEPS, 32, 4096)
        assert (32, 2048) == (room.max_rows, room.max_tokens)

    def test_what_does_not_fit_is_tried_ever_more_rarely(self):
        """
        About log2(n) of n steps run out of memory when each is as large as there is room for.
        """
        room, num_failures, num_steps = StepRoom(), 0, 100_000
        for step in range(num_steps):
            room.advance(step, 64, 4096)
            if (num_rows := room.rows(64)) > 40:
                room.note_failure(num_rows, num_rows, step)
                num_failures += 1
        assert 5 <= num_failures <= 2 + math.log2(num_steps / FIRST_PATIENCE_STEPS)
