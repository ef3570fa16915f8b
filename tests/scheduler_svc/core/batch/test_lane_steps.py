"""Lanes of an executor with stages: what a core plans for it, and what happens to it meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import (
    CoreOptions,
    PreemptionMode,
    StepPriority,
    VictimRule,
)
from scheduler_svc.core.request.request import FinishReason, RequestState
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import GREEDY, Rig, geometry_of, small_config

STAGES = pytest.mark.parametrize("num_stages", [2, 4])
DELAYS = pytest.mark.parametrize("delay", [1, 2, 4])
BOLD = CoreOptions(schedule_conservativeness=0.0)
WIDE = {"max_num_blocks": 128, "max_batch_size": 8, "max_total_tokens": 32}


def rig_of(num_stages: int, *, options: CoreOptions = BOLD, delay: int = 1, **changes) -> Rig:
    """Return a rig whose executor has so many stages."""
    num_host_blocks = changes.pop("num_host_blocks", 0)
    config = small_config(**(WIDE | changes))
    geometry = geometry_of(config, 12, num_host_blocks, num_stages)
    return Rig(config, delay=delay, options=options, geometry=geometry)


def in_depth(num_stages: int, **changes) -> Rig:
    """Return a rig that keeps as many steps in flight as the core allows, all of them long."""
    rig = rig_of(num_stages, **changes)
    rig.usual_step_s = 1.0
    return rig


def decodes_of(batch) -> set[int]:
    """Return the slots of a batch that compute one token each."""
    return set(batch.row_slot[batch.row_num_tokens == 1].tolist())


def decoding(rig: Rig, count: int = 8, **changes) -> Rig:
    """Let requests decode for a while."""
    for _ in range(count):
        rig.submit(prompt_len=3, max_tokens=changes.get("max_tokens", 40))
    for _ in range(12):
        rig.step()
    return rig


def check_outputs(rig: Rig) -> None:
    """Run to the end; every request has the outputs that it has alone."""
    rig.run()
    assert rig.submitted.keys() == rig.ended.keys()
    for handle in rig.submitted:
        assert rig.expected(handle) == rig.outputs[handle]


class TestTurns:
    @STAGES
    def test_steps_in_a_row_have_no_decode_in_common(self, num_stages):
        """
        Requests that decode are in one of every `num_stages` steps, each with an equal share.
        """
        rig = decoding(in_depth(num_stages))
        for _ in range(4 * num_stages):
            rig.step()
        lanes = [decodes_of(batch) for batch in rig.batches[-2 * num_stages :]]
        assert set(range(8)) == set.union(*lanes[:num_stages])
        assert [8 // num_stages] * len(lanes) == [len(lane) for lane in lanes]
        assert lanes[:num_stages] == lanes[num_stages:]
        check_outputs(rig)

    @STAGES
    def test_rows_of_a_lane_keep_their_version(self, num_stages):
        """
        While no request comes or goes, each lane has one version of rows: nothing is built anew.
        """
        rig = decoding(in_depth(num_stages))
        for _ in range(6 * num_stages):
            rig.step()
        versions = [batch.rows_version for batch in rig.batches[-4 * num_stages :]]
        assert num_stages == len(set(versions))
        assert 0 not in versions

    @STAGES
    def test_one_request_alone_is_in_every_step(self, num_stages):
        """
        Empty lanes have no steps: one request takes as many steps as without stages, with `window`
        of them in flight.
        """
        rig = in_depth(num_stages)
        rig.submit(prompt_len=3, max_tokens=10)
        for _ in range(3):
            rig.step()
        assert BOLD.window - 1 == len(rig.pending)
        check_outputs(rig)
        with_rows = [batch for batch in rig.batches if len(batch.row_slot)]
        assert 10 == len(with_rows)

    @STAGES
    @DELAYS
    def test_few_requests_run_to_their_ends(self, num_stages, delay):
        """
        With fewer requests than lanes each runs at its own pace, to its end.
        """
        rig = rig_of(num_stages, delay=delay)
        for count in range(1, num_stages):
            rig.submit(prompt_len=count, max_tokens=3 * count)
        check_outputs(rig)

    @STAGES
    @pytest.mark.parametrize("priority", StepPriority, ids=lambda one: one.name)
    def test_a_long_prompt_is_computed_in_steps_in_a_row(self, num_stages, priority):
        """
        A long prompt beside decodes has a chunk in every step, whichever lane it is of; a lane
        without decodes has its turn too, so that no decode is in two steps in a row.
        """
        share = 1.0 if priority is StepPriority.DECODE_FIRST else 0.5
        options = replace(BOLD, step_priority=priority, max_prefill_share=share)
        rig = in_depth(num_stages, options=options, max_total_tokens=8, max_model_len=128)
        rig.submit(prompt_len=3, max_tokens=40)
        for _ in range(4):
            rig.step()
        first = len(rig.batches)
        long = rig.submit(prompt_len=80, max_tokens=4)
        while not rig.outputs[long]:
            rig.step()
        batches = rig.batches[first:]
        slot = next(a.slot for batch in batches for a in batch.admits)
        chunks = [i for i, batch in enumerate(batches) if slot in batch.row_slot.tolist()]
        assert chunks[:9] == list(range(chunks[0], chunks[0] + 9))
        decodes = [0 in decodes_of(batch) for batch in batches[chunks[0] : chunks[0] + 9]]
        assert -(-9 // num_stages) >= sum(decodes) >= 9 // num_stages
        check_outputs(rig)

    @STAGES
    @DELAYS
    def test_lasting_skew_is_healed(self, num_stages, delay):
        """
        When requests of one lane end, others move there, each while none of its results is under
        way; none is lost or computed twice.
        """
        rig = decoding(rig_of(num_stages, delay=delay), count=8)
        slots = rig.core._replica.slots
        lane = decodes_of(rig.batches[-1])
        for slot in lane:
            handle = int(slots.admitted.handle[slot])
            rig.core.end_handle(handle, FinishReason.STOP_STRING, rig.now, 0)
        rig.collect()
        for _ in range(8 * num_stages):
            rig.step()
        count = slots._lanes.count
        assert max(count) - min(count) <= 1
        assert not slots._lanes.held
        rig.run()
        for handle, end in rig.ended.items():
            if end.reason is not FinishReason.STOP_STRING:
                assert rig.expected(handle) == rig.outputs[handle]


class TestDepth:
    @STAGES
    @pytest.mark.parametrize("window", [1, 2])
    def test_each_lane_has_its_window(self, num_stages, window):
        """
        As many steps as stages times `window` are in flight while all lanes decode, and `window`
        when one does; more never are.
        """
        options = replace(BOLD, window=window, run_ahead=1)
        rig = decoding(in_depth(num_stages, options=options))
        assert num_stages * window == rig.core.most_in_flight
        assert num_stages * window == rig.core.lookahead(1.0)
        assert num_stages * window - 1 == len(rig.pending)
        for handle in range(1, 8):
            rig.core.end_handle(handle, FinishReason.CANCELLED, rig.now)
        assert window == rig.core.lookahead(1.0)

    @STAGES
    def test_prompts_may_be_in_steps_of_all_lanes(self, num_stages):
        """
        While there is a prompt to compute, steps of all lanes are in flight.
        """
        rig = in_depth(num_stages, max_total_tokens=8, max_model_len=128)
        rig.submit(prompt_len=100, max_tokens=2)
        rig.step()
        assert 2 * num_stages == rig.core.lookahead(1.0)
        check_outputs(rig)

    @STAGES
    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_blocks_are_back_soon_after_an_end(self, num_stages, window):
        """
        The next step planned releases what an ended request held: at most stages x window + 1 steps
        after its end it can be used again.
        """
        rig = decoding(in_depth(num_stages, options=replace(BOLD, window=window)))
        rig.core.end_handle(0, FinishReason.CANCELLED, rig.now)
        num_planned = len(rig.batches)
        num_ahead = len(rig.pending)
        rig.step()
        batches = rig.batches[num_planned:]
        released = [i for i, batch in enumerate(batches) if len(batch.release_slot)]
        assert [0] == released
        assert num_ahead + 1 <= num_stages * window + 1
        rig.core.check_integrity()


class TestFaults:
    @STAGES
    @DELAYS
    def test_losing_the_executor_with_all_lanes_in_flight_loses_nothing(self, num_stages, delay):
        """
        Requests of all lanes, in flight or not, run again on the executor in its place.
        """
        rig = decoding(in_depth(num_stages, options=replace(BOLD, window=delay)))
        assert len(rig.pending) >= num_stages * delay - 1
        rig.lose_executor(died_in=None)
        check_outputs(rig)

    def test_an_executor_with_other_stages_may_take_over(self):
        """
        Lanes are as many as the executor has stages, after it was replaced too.
        """
        rig = decoding(in_depth(4))
        for num_stages in (1, 2):
            rig.use_geometry(replace(rig.geometry, num_stages=num_stages))
            for _ in range(12):
                rig.step()
            assert num_stages == rig.core._replica.slots.num_lanes()
        check_outputs(rig)

    @STAGES
    @DELAYS
    @pytest.mark.parametrize("mode", PreemptionMode, ids=lambda one: one.name)
    @pytest.mark.parametrize("rule", VictimRule, ids=lambda one: one.name)
    def test_want_of_blocks_costs_no_token(self, num_stages, delay, mode, rule):
        """
        Rows of any lane are preempted, swapped or paused where blocks are short.
        """
        options = replace(BOLD, preemption_mode=mode, victim_rule=rule, paused_budget_blocks=6)
        rig = rig_of(
            num_stages, options=options, delay=delay, max_num_blocks=14, num_host_blocks=40
        )
        for _ in range(6):
            rig.submit(prompt_len=5, max_tokens=20)
        check_outputs(rig)
        stats = rig.core.stats()
        assert stats.retractions or rule is VictimRule.PAUSED_BUDGET

    @STAGES
    @pytest.mark.parametrize("num_requests", [3, 5])
    def test_a_plan_never_leaves_requests_paused_beside_an_idle_executor(
        self, num_stages, num_requests
    ):
        """
        Where every lane lacks blocks and nothing is in flight, requests are evicted until some go
        on, in the same plan: no result would cause another one.
        """
        options = replace(
            BOLD,
            victim_rule=VictimRule.PAUSED_BUDGET,
            paused_budget_blocks=100,
            prefix_caching=False,
        )
        rig = rig_of(num_stages, options=options, max_num_blocks=9, max_model_len=36)
        for _ in range(num_requests):
            rig.submit(prompt_len=8, max_tokens=20)
        check_outputs(rig)

    @STAGES
    @pytest.mark.parametrize("mode", KvMode, ids=lambda one: one.name)
    def test_a_suspension_loses_nothing(self, num_stages, mode):
        """
        All lanes stop, and go on after the suspension.
        """
        rig = decoding(in_depth(num_stages))
        rig.core.suspend(mode, rig.now)
        while rig.pending or not rig.core.is_suspended:
            rig.step()
        for _ in range(3):
            rig.step()
        rig.core.resume()
        check_outputs(rig)

    @STAGES
    @DELAYS
    def test_a_preempted_row_drains(self, num_stages, delay):
        """
        A row that loses its slot with steps in flight drains, and is admitted again into any lane.
        """
        rig = decoding(rig_of(num_stages, delay=delay * num_stages))
        rig.core.preempt("r3")
        assert rig.core.state_of(3) in {RequestState.DRAINING, RequestState.WAITING}
        check_outputs(rig)


class TestRequests:
    @STAGES
    @DELAYS
    def test_choices_share_their_prompt_over_lanes(self, num_stages, delay):
        """
        Choices of one request share KV of its prompt, whichever lanes they are in.
        """
        rig = in_depth(num_stages, options=replace(BOLD, window=delay))
        rig.submit(prompt_len=10, max_tokens=12, num_choices=6)
        check_outputs(rig)
        num_computed = rig.core._cell.telemetry.counters.compute.prefill_tokens
        assert num_computed < 6 * 10

    @STAGES
    @DELAYS
    def test_cached_prefixes_are_shared_over_lanes(self, num_stages, delay):
        """
        A prompt is found in the cache as soon as the step that computes it was planned.
        """
        rig = in_depth(num_stages, options=replace(BOLD, window=delay))
        prompt = np.arange(17, dtype=np.int32)
        for _ in range(6):
            rig.submit(prompt=prompt, max_tokens=9)
            rig.step()
        check_outputs(rig)
        assert all(end.num_cached_tokens for handle, end in rig.ended.items() if handle)

    @STAGES
    @DELAYS
    def test_log_probabilities_come_with_their_tokens(self, num_stages, delay):
        """
        Log probabilities of outputs and prompts come in order, once.
        """
        rig = in_depth(num_stages, options=replace(BOLD, window=delay))
        sampling = replace(GREEDY, logprobs=2, prompt_logprobs=1)
        for _ in range(5):
            rig.submit(prompt_len=9, max_tokens=7, sampling=sampling)
        check_outputs(rig)
        for handle in rig.submitted:
            assert rig.expected_logprobs(handle) == rig.logprobs[handle]
            assert rig.expected_scores(handle) == rig.scores[handle]
