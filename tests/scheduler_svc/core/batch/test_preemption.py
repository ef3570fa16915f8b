"""Preemption when decodes need more blocks than there are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from scheduler_svc.core.batch.victims import fewest_generated
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import RequestState
from tandem.errors import NeverFits
from tests.scheduler_svc.core.harness import Rig, queue_position, small_config

BOLD = CoreOptions(schedule_conservativeness=0.0)
"""Options that admit whatever fits now, so that blocks run out."""


def tight(delay: int = 1) -> Rig:
    """Return a rig with two requests that together outgrow a pool either of them fits in."""
    rig = Rig(small_config(max_num_blocks=8, max_model_len=32), delay=delay, options=BOLD)
    rig.submit(prompt_len=8, max_tokens=20)
    rig.submit(prompt_len=8, max_tokens=20)
    return rig


def step_until_preempted(rig: Rig):
    for _ in range(60):
        before = rig.core.stats().preemptions
        batch = rig.step()
        if rig.core.stats().preemptions > before:
            return batch
    raise AssertionError("nobody was preempted")


class TestPreemption:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_preempted_requests_produce_the_same_tokens(self, delay):
        """
        Two requests with too few blocks for both still produce what they produce alone.
        """
        rig = tight(delay)
        rig.run()
        assert rig.core.stats().preemptions >= 1
        assert [rig.expected(0), rig.expected(1)] == [rig.outputs[0], rig.outputs[1]]
        assert rig.ended[0].num_preemptions + rig.ended[1].num_preemptions >= 1

    def test_freed_blocks_are_used_in_the_same_batch(self):
        """
        The batch that preempts gives the victim's blocks to the rows that need one.
        """
        rig = tight()
        batch = step_until_preempted(rig)
        assert 1 == len(batch.release_slot)
        assert len(batch.append_slot) >= 1

    def test_nobody_is_admitted_in_a_batch_that_preempts(self):
        """
        Blocks freed by preemption go to running requests, not to waiting ones.
        """
        rig = tight()
        rig.submit(prompt_len=1, max_tokens=1)
        rig.step()
        batch = step_until_preempted(rig)
        assert not batch.admits

    def test_the_victim_waits_in_front(self):
        """
        A preempted request stands ahead of all requests that never ran.
        """
        rig = tight()
        rig.step()
        late = rig.submit(prompt_len=16, max_tokens=4)
        step_until_preempted(rig)
        rig.core.check_integrity()
        assert queue_position(rig.core, late) in {None, 1}
        victims = [handle for handle in (0, 1) if queue_position(rig.core, handle) is not None]
        assert [0] == [queue_position(rig.core, handle) for handle in victims]

    def test_a_victim_is_admitted_with_its_outputs(self):
        """
        A readmission carries prompt and outputs, and says where the prompt ends.
        """
        rig = tight()
        rig.run()
        again = [a for b in rig.batches for a in b.admits if len(a.token_ids) > a.num_prompt_tokens]
        assert again
        for admit in again:
            assert 8 == admit.num_prompt_tokens
            full = [[*rig.submitted[h].prompt.tolist(), *rig.outputs[h]] for h in (0, 1)]
            assert any(
                admit.token_ids.tolist() == tokens[: len(admit.token_ids)] for tokens in full
            )

    def test_a_request_alone_that_outgrows_the_pool_fails_typed(self):
        """
        The last running request is never preempted; if it cannot go on it fails with NEVER_FITS.
        """
        rig = Rig(small_config(max_num_blocks=8), checked=False)
        rig.submit(prompt_len=8, max_tokens=20)
        rig.step()
        rig.core._replica.kv.pool.try_take(5)  # a leak that no legal run can produce
        for _ in range(12):
            if rig.step() is None:
                break
        assert isinstance(rig.failed[0].error, NeverFits)
        assert "8 KV blocks" in rig.failed[0].error.message
        assert 0 == rig.core.stats().preemptions


class TestDraining:
    def test_a_victim_with_results_under_way_drains_first(self):
        """
        A preempted request is readmitted only after all its results were seen, and keeps their
        tokens.
        """
        rig = tight(delay=4)
        step_until_preempted(rig)
        draining = list(rig.core._replica.draining.values())
        assert [RequestState.DRAINING] == [request.state for request in draining]
        victim = draining[0]
        seen = len(victim.outputs)
        while victim.state is RequestState.DRAINING:
            assert victim.place.applied < victim.place.planned
            batch = rig.step()
            assert all(a.place.key != victim.place.key for a in [victim]) or not batch.admits
        assert len(victim.outputs) > seen
        rig.run()
        assert [rig.expected(0), rig.expected(1)] == [rig.outputs[0], rig.outputs[1]]

    def test_results_before_the_release_is_planned_count(self):
        """
        A request that lost its slot between two plans counts results that come before the next.
        """
        rig = Rig(delay=4)
        rig.submit(max_tokens=12)
        for _ in range(3):
            rig.step()
        rig.core.preempt("r0")
        while rig.pending:
            rig.deliver()
        assert RequestState.WAITING is rig.core.state_of(0)
        rig.run()
        assert rig.expected(0) == rig.outputs[0]

    def test_nobody_overtakes_who_drains(self):
        """
        No request is admitted while a preempted one drains, since that one stands first.
        """
        rig = tight(delay=4)
        rig.submit(prompt_len=1, max_tokens=1)
        rig.submit(prompt_len=1, max_tokens=1)
        for _ in range(80):
            draining = bool(rig.core._replica.draining)
            batch = rig.plan()
            if draining and batch is not None and rig.core._replica.draining:
                assert not batch.admits
            rig.now += 1
            while len(rig.pending) >= 4 or (batch is None and rig.pending):
                rig.deliver()
        rig.run()

    def test_a_draining_request_can_end(self):
        """
        A request that ends by its length while draining is not queued again.
        """
        rig = Rig(small_config(max_num_blocks=6, max_model_len=24), delay=4, options=BOLD)
        for _ in range(3):
            rig.submit(prompt_len=6, max_tokens=14)
        rig.run()
        assert rig.core.stats().preemptions > 0
        assert [rig.expected(h) for h in range(3)] == [rig.outputs[h] for h in range(3)]


class TestVictims:
    def victim(self, generated: list[int], prompts: list[int]) -> int:
        """Return the victim among rows with these outputs and prompts, in arrival order."""
        number, prompt_len = np.arange(len(prompts)), np.array(prompts)
        slots = SimpleNamespace(
            admitted=SimpleNamespace(number=number, prompt_len=prompt_len),
            tokens=SimpleNamespace(known=prompt_len + np.array(generated)),
        )
        return fewest_generated(slots, number)

    def test_fewest_generated_goes_first(self):
        """
        The request with the fewest outputs is the victim, since it loses the least work.
        """
        assert 1 == self.victim([5, 2, 9], [4, 4, 4])

    def test_among_equals_the_longest_prompt_goes(self):
        """
        The request with the longest prompt is the victim among equal outputs, since it frees the
        most.
        """
        assert 2 == self.victim([2, 2, 2], [4, 3, 8])

    def test_among_full_equals_the_latest_goes(self):
        """
        The request that arrived last is the victim when all else is equal.
        """
        assert 2 == self.victim([2, 2, 2], [4, 4, 4])
