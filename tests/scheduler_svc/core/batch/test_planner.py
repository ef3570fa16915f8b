"""Contents of a batch: decodes first, then prompts in chunks, then waiting requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.batch import prefill_admission
from scheduler_svc.core.request.options import CoreOptions
from tandem.link.batch import ROW_SAMPLES
from tests.scheduler_svc.core.harness import Rig, geometry_of, queue_position, small_config


def rows(batch) -> list[tuple[int, int, int, int]]:
    """Return (slot, tokens, start, flags) of each row."""
    columns = (batch.row_slot, batch.row_num_tokens, batch.row_start, batch.row_flags)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class TestDecodes:
    def test_all_decodes_run_and_prompts_fill_the_rest(self):
        """
        All D ready decodes are in the batch, before any prompt, when the budget has room for them.
        """
        rig = Rig(small_config(max_total_tokens=16))
        rig.submit(prompt_len=4)
        rig.submit(prompt_len=4)
        rig.step()
        rig.submit(prompt_len=20)
        assert [(0, 1, 4, 1), (1, 1, 4, 1), (2, 14, 0, 0)] == rows(rig.step())

    def test_every_runnable_request_decodes_in_every_batch(self):
        """
        A request that has started gets one token per step until its end.
        """
        rig = Rig()
        handles = [rig.submit(prompt_len=3, max_tokens=9) for _ in range(4)]
        for _ in range(9):
            rig.step()
        assert [9] * 4 == [len(rig.outputs[handle]) for handle in handles]

    def test_a_block_is_taken_when_the_last_is_full(self):
        """
        A decode takes a block exactly where its position starts a new one.
        """
        rig = Rig()
        rig.submit(prompt_len=6, max_tokens=12)
        rig.step()
        appended = [len(rig.step().append_slot) for _ in range(10)]
        # Positions 6 .. 15; 8 and 12 start a block of 4.
        assert [0, 0, 1, 0, 0, 0, 1, 0, 0, 0] == appended

    def test_the_last_token_is_never_computed(self):
        """
        A request of P prompt tokens and max_tokens N computes P + N - 1 positions.
        """
        rig = Rig(delay=4)
        rig.submit(prompt_len=5, max_tokens=7)
        rig.run()
        assert 5 + 7 - 1 == sum(batch.num_tokens for batch in rig.batches)

    def test_one_output_token_needs_no_decode(self):
        """
        A request with max_tokens 1 ends with its prompt.
        """
        rig = Rig(delay=2)
        handle = rig.submit(prompt_len=5, max_tokens=1)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]
        assert 5 == sum(batch.num_tokens for batch in rig.batches)

    def test_with_less_budget_than_decodes_the_longest_unserved_run(self):
        """
        Five ready decodes get their tokens in turn under a budget of 2, and no prompt starts.
        """
        config = small_config(max_batch_size=6, max_total_tokens=6, max_num_blocks=64)
        rig = Rig(config)
        for _ in range(5):
            rig.submit(prompt_len=1, max_tokens=30)
        rig.step()
        rig.core._replica.limits = _with_budget(rig, 2)
        rig.submit(prompt_len=1)
        for _ in range(25):
            batch = rig.step()
            assert 2 == len(batch.row_slot)
            assert not batch.admits
        produced = [len(rig.outputs[handle]) for handle in range(5)]
        assert 5 + 2 * 25 == sum(produced)
        assert max(produced) - min(produced) <= 1

    def test_requests_over_max_batch_size_wait_and_none_starves(self):
        """
        The last of 33 requests runs when a place is free under max_batch_size 32.
        """
        config = small_config(max_batch_size=32, max_total_tokens=256, max_num_blocks=512)
        rig = Rig(config)
        handles = [rig.submit(prompt_len=4, max_tokens=3) for _ in range(33)]
        assert 32 == len(rig.step().row_slot)
        rig.run()
        assert [rig.expected(handle) for handle in handles] == [rig.outputs[h] for h in handles]


def _with_budget(rig: Rig, max_total_tokens: int):
    return replace(rig.core.limits, max_total_tokens=max_total_tokens)


class TestChunkedPrefill:
    @pytest.mark.parametrize("chunks", [1, 2, 3])
    @pytest.mark.parametrize("off_by", [-1, 0, 1, 2])
    def test_a_prompt_over_the_budget_is_split(self, chunks, off_by):
        """
        A prompt near a multiple of the budget is computed in budget-sized chunks, the last one of
        at least two tokens, and its output is the same.
        """
        prompt_len = 16 * chunks + off_by
        rig = Rig(small_config(max_total_tokens=16, max_num_blocks=64))
        handle = rig.submit(prompt_len=prompt_len, max_tokens=4)
        rig.run()
        chunk_lens = [batch.num_tokens for batch in rig.batches if batch.num_tokens]
        full, rest = divmod(prompt_len, 16)
        expected = [16] * full + [rest] * (rest > 0)
        if rest == 1:
            expected[-2:] = [15, 2]
        assert expected == chunk_lens[:-3]
        assert rig.expected(handle) == rig.outputs[handle]

    def test_only_the_last_chunk_samples(self):
        """
        No token exists before the whole prompt was computed.
        """
        rig = Rig(small_config(max_total_tokens=8))
        rig.submit(prompt_len=20, max_tokens=2)
        flags = [rows(rig.step())[0][3] for _ in range(3)]
        assert [0, 0, int(ROW_SAMPLES)] == flags

    def test_started_prompts_go_before_new_ones(self):
        """
        A started prompt gets the budget first; waiting requests get what is left.
        """
        rig = Rig(small_config(max_total_tokens=8))
        rig.submit(prompt_len=12)
        rig.submit(prompt_len=12)
        assert [(0, 8, 0, 0)] == rows(rig.step())
        assert [(0, 4, 8, 1), (1, 4, 0, 0)] == rows(rig.step())
        # One token fewer than there is room for, so that two are left.
        assert [(0, 1, 12, 1), (1, 6, 4, 0)] == rows(rig.step())

    def test_blocks_for_the_whole_prompt_are_held_from_the_start(self):
        """
        A prompt that was started can be computed to its end without another block.
        """
        rig = Rig(small_config(max_total_tokens=4))
        rig.submit(prompt_len=13)
        rig.step()
        assert 4 == rig.core.stats().used_blocks


class TestAdmission:
    def test_requests_start_in_arrival_order(self):
        """
        Requests start and end in the order of their arrival where one runs at a time.
        """
        rig = Rig(small_config(max_batch_size=1))
        for _ in range(4):
            rig.submit(max_tokens=2)
        rig.run()
        assert [0, 1, 2, 3] == [rig.ended[handle].handle for handle in rig.ended]

    def test_a_head_that_does_not_fit_is_not_overtaken(self):
        """
        Smaller requests wait too while the next request in the queue has to wait for blocks.
        """
        rig = Rig(small_config(max_num_blocks=12, max_total_tokens=64))
        rig.submit(prompt_len=24, max_tokens=4)
        rig.step()
        big, small = rig.submit(prompt_len=30, max_tokens=2), rig.submit(prompt_len=1, max_tokens=1)
        rig.step()
        assert (0, 1) == (queue_position(rig.core, big), queue_position(rig.core, small))
        rig.run()
        assert rig.ended[big].queue_s <= rig.ended[small].queue_s

    def test_admission_keeps_a_block_back_for_each_growing_row(self):
        """
        A request is not admitted into the block that a running one is about to need.
        """
        rig = Rig(small_config(max_num_blocks=4))
        rig.submit(prompt_len=4, max_tokens=8)
        rig.step()
        rig.submit(prompt_len=12, max_tokens=1)
        for _ in range(3):
            rig.step()
        assert 0 == rig.core.stats().preemptions
        rig.run()

    def test_generations_grow_with_every_user_of_a_slot(self):
        """
        Successive requests in one slot have growing generations.
        """
        rig = Rig(small_config(max_batch_size=1))
        for _ in range(4):
            rig.submit(max_tokens=1)
        rig.run()
        admissions = [admit for batch in rig.batches for admit in batch.admits]
        assert [(0, 1), (0, 2), (0, 3), (0, 4)] == [(a.slot, a.generation) for a in admissions]

    def test_an_ended_requests_slot_and_blocks_serve_in_the_same_batch(self):
        """
        A batch releases first, so a request can be admitted in it to what it releases.
        """
        rig = Rig(small_config(max_batch_size=1, max_num_blocks=4))
        rig.submit(prompt_len=12, max_tokens=1)
        rig.submit(prompt_len=12, max_tokens=1)
        rig.step()
        batch = rig.step()
        assert [0] == batch.release_slot.tolist()
        assert [0] == [admit.slot for admit in batch.admits]

    def test_an_admission_carries_the_whole_request(self):
        """
        A row is admitted with its tokens, its sampling and blocks for all of them.
        """
        rig = Rig()
        handle = rig.submit(prompt_len=9)
        admit = rig.step().admits[0]
        assert rig.submitted[handle].prompt.tolist() == admit.token_ids.tolist()
        assert (9, 0, 3) == (admit.num_prompt_tokens, admit.num_cached_tokens, len(admit.block_ids))
        assert rig.submitted[handle].sampling is admit.sampling

    def test_the_threshold_stops_prompts_until_use_falls(self):
        """
        No request is admitted at or over memory_threshold; decodes go on, and admission resumes
        after.
        """
        rig = Rig(small_config(max_num_blocks=10, memory_threshold=0.5, max_total_tokens=64))
        rig.submit(prompt_len=19, max_tokens=6)
        waits = rig.submit(prompt_len=2, max_tokens=2)
        rig.step()
        assert 0 == queue_position(rig.core, waits)
        for _ in range(4):
            assert 1 == len(rig.step().row_slot)
        rig.run()
        assert rig.expected(waits) == rig.outputs[waits]


class TestIdle:
    def test_nothing_to_do_plans_nothing(self):
        """
        A core without work plans no batch.
        """
        assert Rig().core.schedule(0.0) is None

    def test_a_batch_may_hold_nothing_but_releases(self):
        """
        The last request's slot is released by a batch without rows; then the core is idle.
        """
        rig = Rig()
        rig.submit(max_tokens=1)
        rig.step()
        batch = rig.step()
        assert ([0], 0) == (batch.release_slot.tolist(), len(batch.row_slot))
        assert not rig.core.has_pending_work()
        assert rig.core.schedule(rig.now) is None

    def test_while_all_is_under_way_nothing_is_planned(self):
        """
        The core waits for results once every position of every request was sent.
        """
        rig = Rig(delay=4)
        rig.submit(prompt_len=2, max_tokens=2)
        rig.plan()
        rig.plan()
        assert rig.core.schedule(rig.now) is None
        assert 2 == rig.core.num_inflight

    def test_the_executor_may_have_more_slots_than_the_batch(self):
        """
        No batch has more rows than max_batch_size, even where the executor has more slots.
        """
        config = small_config()
        rig = Rig(config, geometry=geometry_of(config, num_slots=16))
        for _ in range(10):
            rig.submit()
        rig.run()
        assert 4 == max(len(batch.row_slot) for batch in rig.batches)

    def test_columns_have_the_types_of_the_link(self):
        """
        Batch columns are int32, flags uint8.
        """
        rig = Rig()
        rig.submit(prompt_len=4)
        rig.step()
        batch = rig.step()
        types = {
            name: getattr(batch, name).dtype
            for name in ("row_slot", "row_num_tokens", "row_start", "append_slot", "append_block")
        }
        assert {np.dtype(np.int32)} == set(types.values())
        assert np.uint8 == batch.row_flags.dtype


class TestMessages:
    @pytest.mark.parametrize(("most", "num_admitted"), [(26, 2), (27, 3), (5, 1)])
    def test_a_step_admits_no_more_tokens_than_its_message_holds(
        self, monkeypatch, most, num_admitted
    ):
        """
        A step admits no more tokens than its message holds, cached ones included: a request that no
        longer fits is first in the next step, and one that never fits goes alone.
        """
        options = CoreOptions(schedule_conservativeness=0.0)
        rig = Rig(small_config(max_total_tokens=64), options=options)
        rig.submit(prompt_len=9, num_choices=4)
        rig.step()
        monkeypatch.setattr(prefill_admission, "MAX_SENT_TOKENS", most)
        assert num_admitted == len(rig.step().admits)
        rig.run()
        for handle in range(4):
            assert rig.expected(handle) == rig.outputs[handle]
