"""The batch under construction: each row takes its tokens from the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.slots.decode_rows import GrowingRows
from tandem.link.batch import ROW_SAMPLES
from tests.scheduler_svc.core.harness import Rig, small_config


def builder(budget: int = 20) -> BatchBuilder:
    """Return an empty batch that may have so many tokens."""
    replica = Rig().core._replica
    replica.limits = replace(replica.limits, max_total_tokens=budget)
    return BatchBuilder(replica)


class TestBudget:
    def test_tokens_held_back_are_there_again_later(self):
        """
        Rows that are added meanwhile get none of the tokens that are held back for others.
        """
        batch = builder(20)
        batch.hold_back(12)
        batch.add_prefill(0, 5, samples=False, is_long=False)
        assert 3 == batch.budget
        batch.free_held_back()
        assert 15 == batch.budget
        batch.free_held_back()
        assert 15 == batch.budget

    @pytest.mark.parametrize(
        ("threshold", "budget", "expected"), [(8, 20, 8), (12, 20, 10), (12, 1, 1), (3, 6, 3)]
    )
    def test_long_prompts_share_at_most_half_of_it(self, threshold, budget, expected):
        """
        Long prompts may take the threshold before others, up to half of the budget, at least 1.
        """
        batch = builder(budget)
        batch.limit_long_prompts(threshold)
        assert expected == batch.long_room


class TestRows:
    def test_a_prefill_takes_its_tokens_from_budget_and_long_room(self):
        """
        Only long prompts use up what long prompts share; the last chunk of a prompt samples.
        """
        batch = builder(20)
        batch.limit_long_prompts(8)
        batch.add_prefill(1, 5, samples=True, is_long=False)
        assert (15, 8) == (batch.budget, batch.long_room)
        batch.add_prefill(0, 6, samples=False, is_long=True)
        assert (9, 2) == (batch.budget, batch.long_room)
        assert [(1, 5, int(ROW_SAMPLES)), (0, 6, 0)] == batch.prefills

    def test_a_longer_prefill_takes_only_what_is_added(self):
        """
        A row that gets more tokens keeps its place, and samples if they are its last.
        """
        batch = builder(20)
        batch.add_prefill(1, 5, samples=False, is_long=False)
        batch.add_prefill(0, 6, samples=False, is_long=False)
        batch.lengthen_prefill(0, 7, samples=True)
        assert 7 == batch.budget
        assert [(1, 7, int(ROW_SAMPLES)), (0, 6, 0)] == batch.prefills

    def test_decodes_take_one_token_each_and_count_as_a_step(self):
        """
        The decode rows are added at once, and a batch with decodes is counted.
        """
        rig = Rig(small_config(max_total_tokens=20), delay=1)
        for _ in range(3):
            rig.submit(prompt_len=5, max_tokens=30)
        rig.step()
        rig.step()
        replica = rig.core._replica
        num_steps, batch = replica.steps.num_decode, BatchBuilder(replica)
        rows = replica.slots.decode_rows()
        batch.add_decodes(rows)
        assert (3, 17) == (rows.num_rows, batch.budget)
        assert batch.decodes is rows
        assert num_steps + 1 == replica.steps.num_decode

    def test_preemptions_are_counted_and_nothing_is_sent_for_them(self):
        """
        A batch without rows and releases is none, whatever was preempted.
        """
        batch = builder()
        batch.note_preemption()
        batch.note_preemption()
        assert 2 == batch.num_preempted
        assert batch.batch() is None

    def test_blocks_without_a_row_are_sent(self):
        """
        A batch that only gives a row its next block, as when it goes on in a later step, is sent:
        both ends have the same block tables after it, and the same outputs in the end.
        """
        rig = Rig(small_config(block_size=4), delay=1)
        handle = rig.submit(prompt_len=4, max_tokens=8)
        rig.step()
        replica = rig.core._replica
        growing = GrowingRows(np.array([0], np.intp))
        blocks = replica.kv.pool.try_take_next(replica.slots.next_blocks(growing))
        batch = BatchBuilder(replica)
        batch.append_blocks(growing, blocks)
        sent = batch.batch()
        assert sent is not None
        assert ([], [0], blocks.tolist()) == (
            sent.row_slot.tolist(),
            sent.append_slot.tolist(),
            sent.append_block.tolist(),
        )
        rig.pending.append(rig.executor.execute(sent, rig.core.state_hash))
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]
