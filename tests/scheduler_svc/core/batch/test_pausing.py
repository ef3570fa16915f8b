"""Requests that keep their blocks while they wait for one more."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.options import CoreOptions, StepPriority, VictimRule
from scheduler_svc.core.request.request import FinishReason, RequestState
from tandem.errors import NeverFits
from tests.scheduler_svc.core.harness import Rig, queue_position, small_config


def pausing(budget: int, **changes) -> CoreOptions:
    """Return options that pause within a budget and admit whatever fits now."""
    defaults = {"schedule_conservativeness": 0.0, "prefix_caching": False}
    return CoreOptions(
        victim_rule=VictimRule.PAUSED_BUDGET,
        paused_budget_blocks=budget,
        **(defaults | changes),
    )


def crowd(
    num_requests: int, budget: int, *, num_blocks: int, delay: int = 1, stagger: int = 0, **changes
) -> Rig:
    """
    Return a rig with requests that outgrow the pool together, each started `stagger` steps after
    the one before.
    """
    config = small_config(
        max_num_blocks=num_blocks, max_model_len=40, max_batch_size=8, max_total_tokens=64
    )
    rig = Rig(config, options=pausing(budget, **changes), delay=delay)
    for _ in range(num_requests):
        rig.submit(prompt_len=8, max_tokens=20)
        for _ in range(stagger):
            rig.step()
    return rig


def paused(rig: Rig) -> list[int]:
    """Return the handles of paused requests, the first paused one first."""
    return [int(rig.core._replica.slots.admitted.handle[slot]) for slot in rig.core._replica.paused]


def step_until_paused(rig: Rig):
    for _ in range(100):
        batch = rig.step()
        if rig.core.stats().paused_requests:
            return batch
    raise AssertionError("nobody was paused")


class TestPausing:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("budget", [0, 3, 7, 100])
    def test_a_pool_for_two_of_three_gives_all_their_tokens(self, budget, delay):
        """
        Three growing requests with blocks for two all end with the tokens of a large pool.
        """
        rig = crowd(3, budget, num_blocks=14, delay=delay)
        rig.run()
        for handle in range(3):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_who_is_paused_keeps_slot_and_blocks_and_has_no_row(self):
        """
        A paused request holds what it held and is in no batch; the others go on.
        """
        rig = crowd(3, 100, num_blocks=10, stagger=1)
        step_until_paused(rig)
        slot = next(iter(rig.core._replica.paused))
        handle = paused(rig)[0]
        held = rig.core._replica.slots.blocks.num_blocks[slot]
        assert RequestState.PAUSED is rig.core.state_of(handle)
        while handle in paused(rig):
            batch = rig.plan()
            if handle not in paused(rig):
                break
            assert slot not in batch.row_slot
            assert len(batch.row_slot)
            assert held == rig.core._replica.slots.blocks.num_blocks[slot]
            rig.now += 1
            rig.deliver()
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]

    def test_blocks_go_to_who_arrived_first(self):
        """
        The request that arrived first gets the block when two rows need one and one is left.
        """
        rig = crowd(2, 100, num_blocks=7)
        step_until_paused(rig)
        assert [1] == paused(rig)

    def test_who_was_paused_first_goes_on_first(self):
        """
        Paused requests are resumed in the order in which they were paused.
        """
        rig = crowd(4, 100, num_blocks=14, stagger=1)
        seen: list[int] = []
        while rig.core.has_pending_work():
            before = paused(rig)
            rig.plan()
            resumed = [handle for handle in before if handle not in paused(rig)]
            assert before[: len(resumed)] == resumed
            seen += resumed
            rig.now += 1
            while rig.pending:
                rig.deliver()
        assert len(seen) >= 2
        for handle in range(4):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_a_resumed_request_has_its_row_in_the_same_step(self):
        """
        A request that gets a block decodes in the step that gives it, also where others are paused in its plan.
        """
        config = small_config(
            max_num_blocks=12, max_model_len=40, max_batch_size=8, max_total_tokens=16
        )
        rig = Rig(config, options=pausing(3, prefix_caching=True))
        for prompt_len, max_tokens in ((3, 16), (7, 9), (1, 19), (6, 2), (8, 6)):
            rig.submit(prompt_len=prompt_len, max_tokens=max_tokens)
        num_resumed = 0
        while rig.core.has_pending_work():
            before = set(rig.core._replica.paused)
            batch = rig.plan()
            decoding = rig.core._replica.slots.decoding
            resumed = [slot for slot in before - set(rig.core._replica.paused) if decoding[slot]]
            if batch is not None and batch.num_tokens < 16:
                assert set(resumed) <= set(batch.row_slot.tolist())
                num_resumed += len(resumed)
            rig.now += 1
            while rig.pending:
                rig.deliver()
        assert num_resumed >= 1

    @pytest.mark.parametrize(
        ("num_blocks", "budget", "requests"),
        [
            (14, 8, [(4, 8), (20, 8), (7, 8), (16, 8)]),
            (12, 4, [(4, 14), (2, 14), (16, 14), (4, 5)]),
            (14, 8, [(20, 8), (2, 14), (20, 14), (20, 8)]),
        ],
    )
    def test_prompts_keep_to_their_share_of_a_step_that_resumes(self, num_blocks, budget, requests):
        """
        Where prompts go first, one that goes on beside a resumed decode takes its share and no more.
        """
        config = small_config(
            max_num_blocks=num_blocks, max_model_len=40, max_total_tokens=budget, max_batch_size=4
        )
        changes = {"step_priority": StepPriority.PREFILL_FIRST, "max_prefill_share": 0.25}
        rig = Rig(config, options=pausing(num_blocks, **changes))
        for prompt_len, max_tokens in requests:
            rig.submit(prompt_len=prompt_len, max_tokens=max_tokens)
        rig.run()  # which checks every batch by the rules
        assert all(rig.expected(handle) == rig.outputs[handle] for handle in range(4))

    def test_nobody_is_admitted_while_anyone_is_paused(self):
        """
        Blocks that become free go to paused requests before any waiting one.
        """
        rig = crowd(3, 100, num_blocks=10, stagger=1)
        step_until_paused(rig)
        late = rig.submit(prompt_len=1, max_tokens=1)
        while rig.core.stats().paused_requests:
            batch = rig.plan()
            assert not rig.core.stats().paused_requests or batch is None or not batch.admits
            rig.now += 1
            while rig.pending:
                rig.deliver()
        rig.run()
        assert rig.expected(late) == rig.outputs[late]

    @pytest.mark.parametrize("budget", [0, 2, 5, 100])
    @pytest.mark.parametrize("num_requests", [2, 3, 5])
    def test_somebody_always_runs(self, num_requests, budget):
        """
        At least one request runs whenever any is paused.
        """
        rig = crowd(num_requests, budget, num_blocks=9)
        while rig.core.has_pending_work():
            rig.step()
            replica = rig.core._replica
            assert not replica.paused or replica.slots.num_running > len(replica.paused)
        for handle in range(num_requests):
            assert rig.expected(handle) == rig.outputs[handle]

    @pytest.mark.parametrize("budget", [0, 2, 4, 7])
    def test_paused_requests_keep_no_more_than_the_budget(self, budget):
        """
        Paused requests hold no more blocks than the budget after each plan.
        """
        rig = crowd(6, budget, num_blocks=24, stagger=1)
        while rig.core.has_pending_work():
            rig.step()
            slots = rig.core._replica.slots
            held = sum(int(slots.blocks.num_blocks[slot]) for slot in rig.core._replica.paused)
            assert held == rig.core.num_paused_blocks
            assert held <= budget
        assert rig.core.stats().retractions > 0

    def test_blocks_that_paused_requests_share_count_once(self):
        """
        Blocks that paused choices of one prompt share count once against the budget.
        """
        rig = Rig(
            small_config(max_num_blocks=13, max_model_len=40, max_total_tokens=64),
            options=pausing(7, prefix_caching=True),
        )
        rig.submit(prompt_len=16, max_tokens=20, num_choices=4)
        most = 0
        while rig.core.has_pending_work():
            rig.step()
            slots, replica = rig.core._replica.slots, rig.core._replica
            tables = [
                slots.blocks.table[s, : slots.blocks.num_blocks[s]].tolist() for s in replica.paused
            ]
            distinct = {block for table in tables for block in table}
            assert len(distinct) <= 7
            most = max(most, sum(map(len, tables)))
        assert most > 7
        for handle in range(4):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_who_was_paused_last_is_evicted_first(self):
        """
        The request that was paused last is evicted first beyond the budget, and its blocks are free
        in the same batch.
        """
        rig = crowd(6, 8, num_blocks=24, stagger=1)
        before: list[int] = []
        while not rig.core.stats().retractions:
            before = paused(rig)
            rig.step()
        evicted = [
            handle for handle in range(6)
            if (request := rig.core._cell.requests._by_handle.get(handle))
            and request.setbacks.num_preemptions
        ]  # fmt: skip
        kept = [handle for handle in before if handle in paused(rig)]
        assert before[: len(kept)] == kept
        assert not set(evicted) & set(kept)
        rig.run()

    def test_an_evicted_request_waits_in_front(self):
        """
        An evicted request stands ahead of all requests that never ran.
        """
        rig = crowd(3, 0, num_blocks=10, stagger=1)
        late = rig.submit(prompt_len=30, max_tokens=4)
        while not rig.core.stats().retractions:
            rig.step()
        position = queue_position(rig.core, late)
        assert position is not None
        assert position >= 1
        rig.run()


class TestEndsWhilePaused:
    def test_a_paused_request_can_be_cancelled(self):
        """
        A paused request that is cancelled frees its slot and blocks in the next batch, and others
        go on with them.
        """
        rig = crowd(3, 100, num_blocks=10, stagger=1)
        step_until_paused(rig)
        handle = paused(rig)[0]
        rig.core.end_request(f"r{handle}", FinishReason.CANCELLED, rig.now)
        assert handle not in paused(rig)
        assert 1 == len(rig.step().release_slot)
        rig.run()
        assert FinishReason.CANCELLED is rig.ended[handle].reason

    @pytest.mark.parametrize("delay", [2, 4])
    def test_a_result_under_way_may_end_a_paused_request(self, delay):
        """
        Tokens that were in flight when a request was paused count, also one that ends it.
        """
        rig = crowd(0, 100, num_blocks=7, delay=delay)
        rig.submit(prompt_len=8, max_tokens=20)
        handle = rig.submit(prompt_len=8, max_tokens=20)
        while handle not in paused(rig):
            rig.step()
        # The last token in flight when it was paused; no earlier output equals it.
        offset = (
            int(
                rig.core._replica.slots.planned[
                    rig.core._cell.requests._by_handle[handle].place.slot
                ]
            )
            - 8
        )
        token = rig.expected(handle)[offset]
        assert token not in rig.expected(handle)[:offset]

        rig = crowd(0, 100, num_blocks=7, delay=delay)
        rig.submit(prompt_len=8, max_tokens=20)
        rig.submit(prompt_len=8, max_tokens=20, eos_token_ids=frozenset({token}))
        was_paused = False
        while handle not in rig.ended:
            batch = rig.plan()
            was_paused = handle in paused(rig)
            rig.now += 1
            while len(rig.pending) >= delay or (batch is None and rig.pending):
                rig.deliver()
        assert was_paused
        rig.run()
        for handle in range(2):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_an_executor_that_dies_takes_the_paused_along(self):
        """
        An executor loss leaves no request paused; all wait and finish.
        """
        rig = crowd(3, 100, num_blocks=10, stagger=1)
        step_until_paused(rig)
        rig.lose_executor()
        assert [] == paused(rig)
        rig.run()
        for handle in range(3):
            assert rig.expected(handle) == rig.outputs[handle]


class TestEvents:
    def kinds(self, rig: Rig) -> list[EventKind]:
        return [
            event.kind
            for handle in rig.submitted
            for event in rig.core.request_events(f"r{handle}")
        ]

    def test_each_step_that_leaves_a_request_paused_is_an_event(self):
        """
        A PAUSE event is recorded for each paused request in each step, and none unless asked for.
        """
        for asked in (True, False):
            rig = crowd(
                3, 100, num_blocks=10, stagger=1, track_request_events=True,
                track_paused_events=asked,
            )  # fmt: skip
            num_left_out = 0
            while rig.core.has_pending_work():
                rig.plan()
                num_left_out += rig.core.stats().paused_requests
                rig.now += 1
                while rig.pending:
                    rig.deliver()
            assert num_left_out
            assert num_left_out * asked == self.kinds(rig).count(EventKind.PAUSE)

    def test_a_step_of_prompts_alone_leaves_the_paused_out_too(self):
        """
        A request that is paused while others compute prompts stays paused for that step.
        """
        rig = Rig(
            small_config(max_num_blocks=7, max_model_len=24, max_batch_size=2, max_total_tokens=2),
            options=pausing(100, track_request_events=True, track_paused_events=True),
        )
        first = rig.submit(prompt_len=4, max_tokens=12)
        for _ in range(2):
            rig.step()
        rig.submit(prompt_len=16, max_tokens=2)
        step_until_paused(rig)
        assert [first] == paused(rig)
        num_events = self.kinds(rig).count(EventKind.PAUSE)
        batch = rig.step()
        assert [first] == paused(rig)
        assert 1 == len(batch.row_slot)
        assert num_events + 1 == self.kinds(rig).count(EventKind.PAUSE)
        rig.run()

    def test_losing_paused_blocks_is_an_eviction(self):
        """
        A request that was paused and lost its slot is EVICTed, not RETRACTed.
        """
        rig = crowd(6, 8, num_blocks=24, stagger=1, track_request_events=True)
        rig.run()
        kinds = self.kinds(rig)
        assert rig.core.stats().retractions == kinds.count(EventKind.EVICT)
        assert 0 == kinds.count(EventKind.RETRACT)


class TestWhoRanIsGone:
    def test_an_end_that_frees_no_block_leaves_nobody_stuck(self):
        """
        A paused request is evicted when the last running one ends and all its blocks are shared
        with paused ones, so that the others go on.
        """
        rig = Rig(
            small_config(max_num_blocks=5, max_model_len=20, max_total_tokens=64),
            options=pausing(100, prefix_caching=True),
            delay=12,
        )
        prompt = (np.arange(11, dtype=np.int32) * 3) % 50
        rig.submit(prompt=prompt[:8], max_tokens=1)
        rig.step()
        for last in (7, 8):
            rig.submit(prompt=np.array([*prompt[:10], last], np.int32), max_tokens=9)
        while rig.core.stats().paused_requests < 2:
            rig.plan()
            rig.now += 1
        assert 3 == rig.core._replica.slots.num_running
        rig.run()
        for handle in range(3):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_who_is_alone_and_lacks_a_block_fails_at_once(self):
        """
        A request that runs alone and lacks a block, which only a leak can cause, fails and does not
        wait.
        """
        rig = Rig(
            small_config(max_num_blocks=16, max_total_tokens=64), options=pausing(4), checked=False
        )
        handle = rig.submit(prompt_len=8, max_tokens=40)
        rig.step()
        pool = rig.core._replica.kv.pool
        assert pool.try_take(pool.num_available) is not None
        while rig.core.num_requests:
            rig.step()
        assert isinstance(rig.failed[handle].error, NeverFits)
