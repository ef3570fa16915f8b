"""Division of a step between prompts and decodes, and among prompts."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, StepPriority
from tandem.link.batch import ROW_SAMPLES
from tests.scheduler_svc.core.harness import Rig, small_config

PREFILL_FIRST = StepPriority.PREFILL_FIRST


def make(budget: int = 32, *, delay: int = 1, batch_size: int = 8, **changes) -> Rig:
    """Return a rig with memory to spare and `budget` tokens per step."""
    config = small_config(
        max_num_blocks=256, max_model_len=200, max_total_tokens=budget, max_batch_size=batch_size
    )
    defaults = {"prefix_caching": False}
    return Rig(config, delay=delay, options=CoreOptions(**(defaults | changes)))


def chunks_of(rig: Rig, handle: int, slot: int | None = None, since: int = 0) -> list[int]:
    """
    Return the tokens per batch of a request's prompt, from batch `since` on, where it ran in one
    slot, by default the one with its number.
    """
    prompt_len = len(rig.submitted[handle].prompt)
    chunks = []
    for batch in rig.batches[since:]:
        is_chunk = (batch.row_slot == (handle if slot is None else slot)) & (
            batch.row_start < prompt_len
        )
        chunks += batch.row_num_tokens[is_chunk].tolist()
    return chunks


def start_decoding(rig: Rig, count: int, max_tokens: int = 150) -> list[int]:
    """Submit requests, step until each of them decodes, and return their handles."""
    handles = [rig.submit(prompt_len=2, max_tokens=max_tokens) for _ in range(count)]
    while any(not rig.outputs[handle] for handle in handles):
        rig.step()
    return handles


class TestChunks:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("off_by", [-1, 0, 1, 2])
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_prompts_around_multiples_of_the_chunk(self, count, off_by, delay):
        """
        Chunks are full but for a rest of at least two tokens; the outputs are those of an uncut
        prompt.
        """
        rig = make(chunked_prefill_size=8, delay=delay)
        handle = rig.submit(prompt_len=8 * count + off_by, max_tokens=5)
        rig.run()
        full, rest = divmod(8 * count + off_by, 8)
        expected = [8] * full + [rest] * (rest > 0)
        if rest == 1:
            expected[-2:] = [7, 2]
        assert expected == chunks_of(rig, handle)
        assert rig.expected(handle) == rig.outputs[handle]

    @pytest.mark.parametrize("off_by", [-1, 0, 1, 2])
    def test_with_a_cached_prefix_the_rest_is_chunked(self, off_by):
        """
        Tokens that the prefix cache holds are no part of any chunk.
        """
        rig = make(chunked_prefill_size=8, prefix_caching=True)
        shared = np.arange(20, dtype=np.int32)
        rig.submit(prompt=shared, max_tokens=2)
        rig.run()
        since = len(rig.batches)
        rest = np.arange(16 + off_by, dtype=np.int32) + 25
        handle = rig.submit(prompt=np.concatenate([shared, rest]), max_tokens=5)
        rig.run()
        assert 20 == rig.ended[handle].num_cached_tokens
        expected = {-1: [8, 7], 0: [8, 8], 1: [8, 7, 2], 2: [8, 8, 2]}[off_by]
        assert expected == chunks_of(rig, handle, 0, since)
        assert rig.expected(handle) == rig.outputs[handle]

    @pytest.mark.parametrize("delay", [1, 4])
    @pytest.mark.parametrize("off_by", [-1, 0, 1, 2])
    def test_mixed_with_decodes(self, off_by, delay):
        """
        Decodes take their tokens off the step first; both kinds produce what they do alone.
        """
        rig = make(budget=11, delay=delay)
        decoding = start_decoding(rig, 3, max_tokens=40)
        handle = rig.submit(prompt_len=16 + off_by, max_tokens=5)
        rig.run()
        # 11 - 3 = 8 tokens are left for the prompt.
        expected = {-1: [8, 7], 0: [8, 8], 1: [8, 7, 2], 2: [8, 8, 2]}[off_by]
        assert expected == chunks_of(rig, handle)
        for one in [*decoding, handle]:
            assert rig.expected(one) == rig.outputs[one]

    def test_only_the_last_chunk_samples(self):
        """
        No token is sampled until the prompt is computed to its end.
        """
        rig = make(chunked_prefill_size=4)
        rig.submit(prompt_len=12, max_tokens=3)
        assert [0, 0, int(ROW_SAMPLES)] == [int(rig.step().row_flags[0]) for _ in range(3)]

    def test_a_chunk_size_limits_each_prompt_not_their_sum(self):
        """
        Two prompts get a chunk each in one step.
        """
        rig = make(chunked_prefill_size=8)
        rig.submit(prompt_len=20)
        rig.submit(prompt_len=20)
        assert [8, 8] == rig.step().row_num_tokens.tolist()

    def test_a_prompt_of_one_token_is_computed(self):
        """
        A prompt of one token is computed in one chunk of one token.
        """
        rig = make()
        handle = rig.submit(prompt_len=1, max_tokens=2)
        rig.run()
        assert [1] == chunks_of(rig, handle)

    def test_a_single_token_of_a_longer_prompt_waits(self):
        """
        A prompt for which another one leaves a single token of a step starts a step later.
        """
        rig = make(budget=8)
        rig.submit(prompt_len=7)
        late = rig.submit(prompt_len=9)
        assert [7] == rig.step().row_num_tokens.tolist()
        rig.run()
        # The first one decodes meanwhile: 8 - 1 = 7 tokens are left.
        assert [7, 2] == chunks_of(rig, late)

    def test_one_token_is_taken_where_a_step_never_has_more(self):
        """
        A prompt beside decodes that leave one token per step is computed token by token.
        """
        rig = make(budget=4, batch_size=4)
        decoding = start_decoding(rig, 3)
        handle = rig.submit(prompt_len=6, max_tokens=3)
        while not rig.outputs[handle]:
            rig.step()
        assert not any(one in rig.ended for one in decoding)
        assert [1] * 6 == chunks_of(rig, handle)
        rig.run()

    @pytest.mark.parametrize("budget", [2, 3, 4, 5])
    @pytest.mark.parametrize("prompt_len", range(1, 14))
    def test_tiny_steps_end(self, budget, prompt_len):
        """
        Every prompt is computed once and to its end under any budget, and no chunk is empty.
        """
        rig = make(budget=budget, batch_size=2)
        handles = [rig.submit(prompt_len=prompt_len, max_tokens=3) for _ in range(3)]
        rig.run()
        positions = sum(len(rig.submitted[handle].prompt) + 2 for handle in handles)
        assert positions == sum(batch.num_tokens for batch in rig.batches)
        for handle in handles:
            assert rig.expected(handle) == rig.outputs[handle]


class TestDecodeFirst:
    def test_every_decode_has_its_token_in_every_batch(self):
        """
        Each decoding request gets one token per step, however many prompts wait.
        """
        rig = make(budget=12)
        decoding = start_decoding(rig, 4)
        for _ in range(4):
            rig.submit(prompt_len=60, max_tokens=4)
        for _ in range(30):
            batch = rig.step()
            slots = rig.core._replica.slots.admitted.handle[batch.row_slot[: len(decoding)]]
            assert decoding == sorted(slots.tolist())
            assert (batch.row_num_tokens[: len(decoding)] == 1).all()

    @pytest.mark.parametrize(("share", "most"), [(0.5, 16), (0.25, 8), (0.01, 1)])
    def test_prompts_get_no_more_than_their_share_beside_decodes(self, share, most):
        """
        A step computes at most the share of max_total_tokens of prompts while others decode, and at
        least one token.
        """
        rig = make(max_prefill_share=share)
        start_decoding(rig, 2)
        for _ in range(3):
            rig.submit(prompt_len=30, max_tokens=2)
        prompt_tokens = []
        for _ in range(4):
            admitted = rig.core._replica.slots.admitted.known_len
            batch = rig.plan()
            is_prompt = batch.row_start < admitted[batch.row_slot]
            prompt_tokens.append(int(batch.row_num_tokens[is_prompt].sum()))
            rig.deliver()
        assert [most] * 4 == prompt_tokens
        rig.run()

    def test_without_decodes_prompts_may_have_it_all(self):
        """
        The share holds only while others decode.
        """
        rig = make(max_prefill_share=0.25)
        rig.submit(prompt_len=40)
        assert 32 == rig.step().num_tokens


class TestPrefillFirst:
    @pytest.mark.parametrize("delay", [1, 4])
    def test_prompts_go_before_decodes(self, delay):
        """
        Decodes get what prompts leave of a step while these are computed; tokens are the same.
        """
        rig = make(budget=16, step_priority=PREFILL_FIRST, delay=delay)
        decoding = start_decoding(rig, 2, max_tokens=30)
        handle = rig.submit(prompt_len=32, max_tokens=5)
        first, second = rig.step(), rig.step()
        assert [16] == first.row_num_tokens.tolist() == second.row_num_tokens.tolist()
        third = rig.step()
        assert len(third.row_slot) >= 2
        rig.run()
        for one in [*decoding, handle]:
            assert rig.expected(one) == rig.outputs[one]

    def test_decodes_use_the_rest_of_the_step(self):
        """
        A prompt shorter than the step leaves tokens for decodes, longest unserved first.
        """
        rig = make(budget=8, step_priority=PREFILL_FIRST)
        start_decoding(rig, 3)
        rig.submit(prompt_len=6)
        batch = rig.step()
        assert [1, 1, 6] == batch.row_num_tokens.tolist()
        left_out = {0, 1, 2} - set(batch.row_slot.tolist())
        rig.submit(prompt_len=7)
        assert left_out == set(rig.step().row_slot[:1].tolist())

    def test_the_share_keeps_tokens_for_decodes(self):
        """
        Decodes get the rest of every step under a share below 1.
        """
        rig = make(budget=16, step_priority=PREFILL_FIRST, max_prefill_share=0.5)
        decoding = start_decoding(rig, 3)
        rig.submit(prompt_len=60)
        for _ in range(5):
            batch = rig.step()
            assert [1, 1, 1, 8] == batch.row_num_tokens.tolist()
        assert 3 == len(decoding)

    @pytest.mark.parametrize("delay", [1, 2])
    def test_blocks_that_run_out_wait_for_a_step_of_decodes(self, delay):
        """
        Every request ends with the tokens of unlimited memory, though blocks run out.
        """
        config = small_config(max_num_blocks=16, max_batch_size=6, max_total_tokens=8)
        options = CoreOptions(
            step_priority=PREFILL_FIRST, schedule_conservativeness=0.0, prefix_caching=False
        )
        rig = Rig(config, options=options, delay=delay)
        for prompt_len in (4, 20, 4, 16, 8, 24):
            rig.submit(prompt_len=prompt_len, max_tokens=30)
        rig.run()
        assert rig.core.stats().retractions >= 1
        for handle in range(6):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_the_oldest_decode_gets_the_last_block_beside_prompts(self):
        """
        Where one block is left for two decodes of a step with prompts, the older one grows, and tokens stay right.
        """
        config = small_config(
            max_num_blocks=17, max_model_len=36, max_total_tokens=10, max_batch_size=6
        )
        options = CoreOptions(
            step_priority=PREFILL_FIRST, max_prefill_share=0.5, schedule_conservativeness=0.0,
            prefix_caching=False,
        )  # fmt: skip
        rig = Rig(config, options=options)
        for prompt_len in (7, 16, 5, 18):
            rig.submit(prompt_len=prompt_len, max_tokens=14)
        rig.run()
        for handle in range(4):
            assert rig.expected(handle) == rig.outputs[handle]


class TestLongPrompts:
    def steps_until_first_token(self, rig: Rig, handle: int) -> int:
        for count in range(1, 200):
            rig.step()
            if rig.outputs[handle]:
                return count
        raise AssertionError("no token")

    def test_a_short_prompt_is_not_stuck_behind_long_ones(self):
        """
        A short prompt starts at once under a threshold, however many long ones are ahead, and waits
        without one.
        """
        steps = []
        for threshold in (8, None):
            rig = make(budget=16, long_prefill_threshold=threshold)
            for _ in range(3):
                rig.submit(prompt_len=120, max_tokens=2)
            rig.step()
            short = rig.submit(prompt_len=6, max_tokens=2)
            steps.append(self.steps_until_first_token(rig, short))
            rig.run()
            for handle in range(4):
                assert rig.expected(handle) == rig.outputs[handle]
        assert 1 == steps[0]
        assert steps[1] > 20

    def test_a_threshold_over_the_budget_leaves_half_of_the_step(self):
        """
        Prompts over the threshold, however high it is, leave shorter ones half of what there is.
        """
        rig = make(budget=16, long_prefill_threshold=100)
        rig.submit(prompt_len=150, max_tokens=2)
        rig.step()
        short = rig.submit(prompt_len=8, max_tokens=2)
        assert 1 == self.steps_until_first_token(rig, short)

    def test_long_prompts_use_what_nobody_else_needs(self):
        """
        A long prompt alone gets whole steps.
        """
        rig = make(budget=16, long_prefill_threshold=4)
        handle = rig.submit(prompt_len=50, max_tokens=2)
        rig.run()
        assert [16, 16, 16, 2] == chunks_of(rig, handle)

    def test_a_last_token_of_the_step_goes_to_a_long_prompt_too(self):
        """
        A single token that shorter prompts leave of a step goes to a long prompt.
        """
        rig = make(budget=9, long_prefill_threshold=4)
        rig.submit(prompt_len=40, max_tokens=2)
        rig.submit(prompt_len=4, max_tokens=2)
        assert 9 == rig.step().num_tokens

    def test_long_prompts_make_progress_beside_short_ones(self):
        """
        A stream of short prompts leaves a long one its part of every step.
        """
        rig = make(budget=16, long_prefill_threshold=8)
        long = rig.submit(prompt_len=100, max_tokens=2)
        rig.step()
        for _ in range(12):
            rig.submit(prompt_len=8, max_tokens=1)
            rig.submit(prompt_len=8, max_tokens=1)
            rig.step()
        assert rig.outputs[long]
        rig.run()

    def test_a_long_prompt_is_started_when_the_one_before_is_done(self):
        """
        Long prompts are computed one after the other, in order, while short ones keep coming.
        """
        rig = make(budget=16, long_prefill_threshold=8)
        first, second = (rig.submit(prompt_len=60, max_tokens=1) for _ in range(2))
        while second not in rig.ended:
            rig.submit(prompt_len=8, max_tokens=1)
            rig.submit(prompt_len=8, max_tokens=1)
            rig.step()
            assert rig.now < 60
        assert rig.ended[first].total_s < rig.ended[second].total_s
        rig.run()

    def test_a_prompt_as_long_as_the_threshold_is_not_long(self):
        """
        Two prompts of the threshold's length are computed side by side; of longer ones the second waits.
        """
        for prompt_len, expected in ((4, [4, 4]), (5, [5])):
            rig = make(budget=9, long_prefill_threshold=4)
            rig.submit(prompt_len=prompt_len, max_tokens=1)
            rig.submit(prompt_len=prompt_len, max_tokens=1)
            assert expected == rig.step().row_num_tokens.tolist()[: len(expected)]

    def test_the_last_token_of_a_step_goes_to_a_prompt_that_needs_just_one(self):
        """
        A chunk of one token is worth a row where it ends its prompt.
        """
        rig = make(budget=9)
        rig.submit(prompt_len=8, max_tokens=1)
        rig.submit(prompt_len=1, max_tokens=1)
        assert [8, 1] == rig.step().row_num_tokens.tolist()

    @pytest.mark.parametrize("delay", [1, 4])
    @pytest.mark.parametrize("chunk", [None, 3, 8])
    def test_with_chunks_and_decodes_tokens_are_the_same(self, chunk, delay):
        """
        All knobs together change when a prompt is computed, never what comes of it.
        """
        rig = make(
            budget=12, long_prefill_threshold=6, chunked_prefill_size=chunk, max_prefill_share=0.75,
            delay=delay, batch_size=4,
        )  # fmt: skip
        for prompt_len in (30, 3, 7, 6, 50, 1, 2, 9):
            rig.submit(prompt_len=prompt_len, max_tokens=9)
        rig.run()
        for handle in range(8):
            assert rig.expected(handle) == rig.outputs[handle]
