"""Lookahead: the four rules of planning before earlier results are back, and the depth."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.lookahead import SHORT_STEP_S
from scheduler_svc.core.request.options import CoreOptions, PreemptionMode, VictimRule
from scheduler_svc.core.request.request import FinishReason, RequestState
from tandem.errors import InvalidConfig
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config

WINDOWS = pytest.mark.parametrize("window", [1, 2, 4, 8])
BOLD = CoreOptions(schedule_conservativeness=0.0)
WIDE = small_config(max_num_blocks=64, max_batch_size=4)


def in_flight(rig: Rig, count: int) -> None:
    """Plan until so many steps are in flight, with their results not back."""
    while len(rig.pending) < count:
        rig.plan()


def decoding(window: int, count: int = 3, **changes) -> Rig:
    """Return a rig with requests that decode with `window` steps in flight."""
    rig = Rig(changes.pop("config", WIDE), delay=window, options=changes.pop("options", BOLD))
    for _ in range(count):
        rig.submit(prompt_len=5, max_tokens=30, **changes)
    rig.plan()
    rig.deliver()
    in_flight(rig, window)
    return rig


class TestRule1:
    """A row that lost its slot drains, and its tokens in flight are kept."""

    @WINDOWS
    def test_it_drains_until_its_results_are_back(self, window):
        """
        A preempted row is DRAINING until planned equals applied; only then it waits, and no plan
        admits it before.
        """
        rig = decoding(window)
        rig.core.preempt("r1")
        known = len(rig.core.outputs(1))
        for left in range(window, 0, -1):
            assert RequestState.DRAINING is rig.core.state_of(1)
            request = rig.core._cell.requests._by_handle[1]
            assert left == request.place.planned - request.place.applied
            batch = rig.core.schedule(rig.now) if left == window else None
            if batch is not None:
                rig.pending.append(rig.executor.execute(batch, rig.core.state_hash))
                assert not batch.admits
            rig.deliver()
        assert RequestState.WAITING is rig.core.state_of(1)
        assert known + window == len(rig.core.outputs(1))
        rig.run()
        assert rig.expected(1) == rig.outputs[1]

    @WINDOWS
    def test_tokens_past_an_end_are_dropped(self, window):
        """
        Tokens in flight of a draining row are kept up to its end and dropped after it.
        """
        rig = Rig(WIDE, delay=window)
        end = rig.submit(prompt_len=5, max_tokens=30)
        stop = rig.expected(end)[4]
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        handle = rig.submit(
            prompt=rig.submitted[end].prompt, max_tokens=30, stop_token_ids=frozenset({stop})
        )
        rig.step()
        in_flight(rig, window)
        rig.core.preempt("r1")
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]
        assert FinishReason.STOP_TOKEN == rig.ended[handle].reason

    @WINDOWS
    def test_a_slot_s_new_row_gets_none_of_the_old_one_s_tokens(self, window):
        """
        A request that takes over a slot at once is not given what was in flight for the row before:
        results are matched by slot and generation.
        """
        rig = decoding(window, config=small_config(max_batch_size=3), count=4)
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.collect()
        outputs = list(rig.outputs[0])
        batch = rig.plan()
        assert [3] == [int(rig.core._replica.slots.admitted.handle[a.slot]) for a in batch.admits]
        assert 0 in batch.release_slot
        rig.run()
        assert outputs == rig.outputs[0]
        assert rig.expected(3) == rig.outputs[3]

    @WINDOWS
    def test_victims_are_chosen_by_what_is_known(self, window):
        """
        The request with the fewest known outputs is retracted, whatever is in flight for any of
        them.
        """
        rig = Rig(small_config(max_num_blocks=9, max_total_tokens=8), delay=window, options=BOLD)
        for _ in range(3):
            rig.submit(prompt_len=7, max_tokens=16)
        known = {}
        while not rig.core.stats().retractions and rig.core.num_requests:
            known = {handle: len(rig.core.outputs(handle)) for handle in range(3)}
            rig.step()
        lost = [
            h for h in range(3) if rig.core._cell.requests._by_handle[h].setbacks.num_preemptions
        ]
        assert lost
        order = sorted(known, key=lambda handle: (known[handle], -handle))
        assert order[: len(lost)] == sorted(lost, reverse=True)
        rig.run()
        for handle in range(3):
            assert rig.expected(handle) == rig.outputs[handle]


class TestRule2:
    """The next batch may use slots and blocks that one released; host blocks too, in order."""

    @WINDOWS
    def test_slots_and_blocks_are_used_again_at_once(self, window):
        """
        The slot and blocks of a row that ended belong to another in the next batch planned, while
        steps that write them are in flight; its KV is right all the same.
        """
        config = small_config(max_batch_size=1, max_num_blocks=4, max_model_len=16)
        rig = Rig(config, delay=window, options=CoreOptions(prefix_caching=False))
        first = rig.submit(prompt_len=5, max_tokens=11)
        second = rig.submit(prompt_len=5, max_tokens=11)
        rig.step()
        in_flight(rig, window)
        rig.core.end_handle(first, FinishReason.STOP_STRING, rig.now)
        rig.collect()
        batch = rig.plan()
        assert [0] == batch.release_slot.tolist()
        assert [(0, 2)] == [(admit.slot, admit.generation) for admit in batch.admits]
        rig.run()
        assert rig.expected(second) == rig.outputs[second]

    @WINDOWS
    def test_swapped_rows_come_back_right(self, window):
        """
        KV goes to host memory and back with steps in flight on both sides of the copies.
        """
        config = small_config(max_num_blocks=10)
        options = CoreOptions(
            schedule_conservativeness=0.0, preemption_mode=PreemptionMode.SWAP,
            prefix_caching=False,
        )  # fmt: skip
        geometry = geometry_of(config, 8, 12)
        rig = Rig(config, delay=window, options=options, geometry=geometry)
        for _ in range(4):
            rig.submit(prompt_len=7, max_tokens=18)
        rig.run()
        assert rig.core.stats().swapped_in_blocks
        for handle in range(4):
            assert rig.expected(handle) == rig.outputs[handle]


class TestRule3:
    """Ends from outside take effect in the next batch planned."""

    @WINDOWS
    @pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.STOP_STRING])
    def test_blocks_are_back_in_the_next_batch_planned(self, window, reason):
        """
        A row that is aborted or ended by a stop string is computed by no further step, and its
        blocks are back after at most one result and one plan, which is within window + 1 steps.
        """
        rig = decoding(window)
        held = rig.core.stats().used_blocks
        slot = rig.core._cell.requests._by_handle[1].place.slot
        rig.core.end_handle(1, reason, rig.now, 1)
        rig.collect()
        rig.deliver()
        batch = rig.plan()
        assert slot in batch.release_slot
        assert slot not in batch.row_slot
        assert rig.core.stats().used_blocks < held
        rig.run()
        assert rig.ended[1].num_output_tokens == 1

    @WINDOWS
    def test_all_blocks_are_back_when_all_are_aborted(self, window):
        """
        The next batch holds nothing but releases when all requests are aborted, and all blocks are
        free before the results in flight are back.
        """
        rig = decoding(window)
        for handle in range(3):
            rig.core.end_handle(handle, FinishReason.CANCELLED, rig.now)
        rig.collect()
        batch = rig.plan()
        assert (3, 0) == (len(batch.release_slot), len(batch.row_slot))
        assert 0 == rig.core.stats().used_blocks
        rig.run()

    @WINDOWS
    def test_a_deadline_takes_effect_in_the_next_batch(self, window):
        """
        A deadline that passes with steps in flight ends its request in the next plan.
        """
        rig = Rig(WIDE, delay=window)
        handle = rig.submit(prompt_len=5, max_tokens=30, deadline_s=2.5)
        rig.submit(prompt_len=5, max_tokens=30)
        rig.step()
        in_flight(rig, window)
        rig.now = 3.0
        batch = rig.plan()
        assert FinishReason.DEADLINE == rig.ended[handle].reason
        assert 1 == len(batch.release_slot)
        rig.run()

    @WINDOWS
    @pytest.mark.parametrize("mode", KvMode)
    def test_a_suspension_waits_for_nothing_in_flight(self, window, mode):
        """
        Steps in flight are applied during a suspension, and running requests go on with equal
        tokens.
        """
        rig = decoding(window)
        rig.core.suspend(mode, rig.now)
        for _ in range(window + 2):
            rig.step()
        assert not rig.pending
        rig.core.resume()
        rig.run()
        for handle in range(3):
            assert rig.expected(handle) == rig.outputs[handle]


class TestRule4:
    """KV that a step writes can be matched by the next one as soon as that step was sent."""

    @WINDOWS
    def test_a_prompt_is_found_before_its_result_is_back(self, window):
        """
        A block can be found from the batch on that follows the one writing its last position.
        """
        rig = Rig(WIDE, delay=window)
        prompt = np.arange(9, dtype=np.int32)
        rig.submit(prompt=prompt)
        rig.plan()
        second = rig.submit(prompt=prompt)
        (admission,) = rig.plan().admits
        assert 8 == admission.num_cached_tokens
        rig.run()
        assert rig.expected(second) == rig.outputs[second]

    @WINDOWS
    def test_a_row_error_takes_back_what_others_found(self, window):
        """
        A request that found KV of a row with a later error starts over and has right tokens.
        """
        rig = Rig(WIDE, delay=window)
        prompt = np.arange(13, dtype=np.int32)
        rig.poisons_next = True
        rig.submit(prompt=prompt)
        rig.plan()
        others = [rig.submit(prompt=prompt) for _ in range(2)]
        rig.plan()
        rig.run()
        assert "INVALID_LOGITS" == rig.failed[0].error.reason
        for handle in others:
            assert rig.expected(handle) == rig.outputs[handle]


class TestLengths:
    @pytest.mark.parametrize("window", [1, 2, 4, 8, 16])
    def test_no_step_computes_past_an_end_by_length(self, window):
        """
        A request computes all of its tokens but the last and no position twice, however many steps
        are in flight.
        """
        rig = Rig(WIDE, delay=window)
        rig.usual_step_s = None
        handles = [rig.submit(prompt_len=5, max_tokens=count) for count in (1, 2, 7, 30)]
        rig.run()
        computed = sum(batch.num_tokens for batch in rig.batches)
        assert sum(5 + count - 1 for count in (1, 2, 7, 30)) == computed
        for handle in handles:
            assert rig.expected(handle) == rig.outputs[handle]


class TestDepth:
    def rig(self, **changes) -> Rig:
        options = CoreOptions(
            **{"window": 2, "run_ahead": 6, "schedule_conservativeness": 0.0} | changes
        )
        rig = Rig(small_config(max_num_blocks=32), options=options)
        for _ in range(3):
            rig.submit(prompt_len=5, max_tokens=30)
        rig.plan()
        return rig

    def test_more_steps_run_while_nobody_waits(self):
        """
        Short steps are sent up to run_ahead while all requests decode and none waits.
        """
        rig = self.rig()
        assert 6 == rig.core.lookahead(0.001)
        rig.run()

    @pytest.mark.parametrize("step_s", [0.0, SHORT_STEP_S, 0.02])
    def test_long_steps_and_unknown_ones_are_not_sent_ahead(self, step_s):
        """
        Steps of five milliseconds or more, or of unknown length, keep to the window.
        """
        rig = self.rig()
        assert 2 == rig.core.lookahead(step_s)
        rig.run()

    def test_run_ahead_under_the_window_does_nothing(self):
        """
        The depth is never less than the window.
        """
        assert 4 == self.rig(window=4, run_ahead=3).core.lookahead(0.001)

    @pytest.mark.parametrize(("window", "run_ahead"), [(2, 6), (4, 3)])
    def test_largest_depth_is_known_beforehand(self, window, run_ahead):
        """
        The port tells the most steps that may ever be in flight, which short steps reach.
        """
        core = self.rig(window=window, run_ahead=run_ahead).core
        assert max(window, run_ahead) == core.most_in_flight == core.lookahead(0.001)

    def test_who_waits_is_not_made_to_wait_longer(self):
        """
        The window holds while a request waits or a prompt is under way.
        """
        rig = self.rig()
        rig.submit(prompt_len=20, max_tokens=2)
        assert 2 == rig.core.lookahead(0.001)
        rig.plan()
        assert RequestState.PREFILL is rig.core.state_of(3)
        assert 2 == rig.core.lookahead(0.001)
        rig.plan()
        assert RequestState.DECODE is rig.core.state_of(3)
        assert 6 == rig.core.lookahead(0.001)
        rig.run()

    def test_who_drains_or_was_just_ended_keeps_to_the_window(self):
        """
        The window holds while a request drains or an ended one's slot is to be released.
        """
        rig = self.rig()
        rig.core.end_handle(0, FinishReason.CANCELLED, rig.now)
        assert 2 == rig.core.lookahead(0.001)
        rig.collect()
        rig.plan()
        assert 6 == rig.core.lookahead(0.001)
        rig.core.preempt("r1")
        rig.plan()
        assert RequestState.DRAINING is rig.core.state_of(1)
        assert 2 == rig.core.lookahead(0.001)
        rig.run()

    def test_a_paused_row_keeps_to_the_window(self):
        """
        The window holds while a request is paused for want of a block.
        """
        options = CoreOptions(
            victim_rule=VictimRule.PAUSED_BUDGET, paused_budget_blocks=4,
            schedule_conservativeness=0.0, run_ahead=8,
        )  # fmt: skip
        rig = Rig(small_config(max_num_blocks=6), options=options)
        for _ in range(2):
            rig.submit(prompt_len=7, max_tokens=14)
        while not rig.core._replica.paused and rig.core.num_requests:
            rig.step()
        assert 2 == rig.core.lookahead(0.001)
        rig.run()

    @pytest.mark.parametrize(("num_free", "depth"), [(5, 2), (6, 6)])
    def test_blocks_for_all_of_the_steps_must_be_free(self, num_free, depth):
        """
        Short steps are sent ahead only while each decode has a block available for every four of
        them.
        """
        rig = self.rig()
        pool = rig.core._replica.kv.pool
        taken = pool.try_take(pool.num_available - num_free)
        assert depth == rig.core.lookahead(0.001)
        pool.give_back(taken)
        rig.run()

    def test_arrivals_find_the_window(self):
        """
        A request that arrives while many steps are in flight is in the next step planned, which
        comes only when fewer than the window are left.
        """
        rig = self.rig()
        rig.usual_step_s = 0.001
        while len(rig.pending) < 5:
            rig.step()
        late = rig.submit(prompt_len=5, max_tokens=3)
        num_planned, num_left = len(rig.batches), 0
        while rig.core.state_of(late) is RequestState.WAITING:
            num_left = len(rig.pending)
            rig.step()
        assert 1 == num_left
        assert 1 == len(rig.batches[num_planned].admits)
        rig.run()
        assert rig.expected(late) == rig.outputs[late]

    @pytest.mark.parametrize("name", ["window", "run_ahead"])
    @pytest.mark.parametrize("value", [0, 17, -1])
    def test_senseless_depths_are_refused(self, name, value):
        """
        Depths are from 1 to 16.
        """
        with pytest.raises(InvalidConfig, match=f"{name} is {value}: it must be from 1 to 16"):
            CoreOptions(**{name: value}).validate()
