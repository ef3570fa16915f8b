"""Admission of waiting requests where several executors could compute them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.batch.routing import MAX_AFFINITY_S, PREFERENCE_S
from scheduler_svc.core.request.options import CoreOptions, Routing
from scheduler_svc.core.state.pace import START_S, Pace
from tandem.link.results import StepTimings
from tests.scheduler_svc.core.harness import geometry_of, small_config
from tests.scheduler_svc.core.replicas.fleet_rig import FleetRig

AFFINE = [Routing.LONGEST_PREFIX, Routing.FIRST_PREFIX_BLOCK]
SHARED = np.arange(16, dtype=np.int32) % 50
"""Prompt of four blocks that many requests begin with."""


def rig_of(routing: Routing, num_executors: int = 2, alpha: float = 1.0, **changes) -> FleetRig:
    """Return a rig under a policy."""
    ageing_s = changes.pop("ageing_s", 5.0)
    options = CoreOptions(routing=routing, prefix_caching_routing_alpha=alpha, ageing_s=ageing_s)
    return FleetRig(num_executors, config=small_config(**changes), options=options)


def with_tail(*tail: int) -> np.ndarray:
    """Return a prompt that goes on from the shared one."""
    return np.append(SHARED, tail).astype(np.int32)


def fill(rig: FleetRig, number: int) -> None:
    """Have an executor run as many long requests as it can, and no other run any."""
    while rig.engines[number].port.num_slots_in_use < rig.config.max_batch_size:
        rig.submit(prompt_len=4, max_tokens=20)
        while rig.core.waiting_handles():
            rig.now += MAX_AFFINITY_S
            rig.turn(number)


class TestPreferenceWithRoom:
    @pytest.mark.parametrize("routing", [*AFFINE, Routing.ROUND_ROBIN])
    def test_another_executor_leaves_it_for_a_moment(self, routing):
        """The preferred one is idle and may be slow to plan; then any takes it."""
        rig = rig_of(routing)
        rig.submit(prompt=SHARED)
        while rig.core.has_pending_work():
            rig.turn(0)
        handle = rig.submit(prompt=with_tail(1))
        own = rig.core._cell.router.preferred(rig.core._cell.requests.find(handle))
        other = 1 - own
        began_s = rig.now
        num_before = rig.engines[other].num_admitted
        while rig.engines[other].num_admitted == num_before:
            rig.turn(other)
        waited_s = rig.now - began_s
        bound_s = MAX_AFFINITY_S if routing is Routing.ROUND_ROBIN else PREFERENCE_S
        assert bound_s <= waited_s <= bound_s + 0.011

    def test_equal_executors_take_requests_in_turn(self):
        """Of those with equally little to do, the one that was chosen least recently is next."""
        rig = rig_of(Routing.LOAD_BALANCED, 4)
        order = []
        for _ in range(8):
            rig.submit(prompt_len=3, max_tokens=1)
            before = [engine.num_admitted for engine in rig.engines.values()]
            rig.run()
            after = [engine.num_admitted for engine in rig.engines.values()]
            order.append([now - was for was, now in zip(before, after, strict=True)].index(1))
        assert [0, 1, 2, 3, 0, 1, 2, 3] == order

    def test_what_is_left_to_an_executor_counts_as_its_work(self):
        """One plan does not leave the whole queue to the one executor that is idle."""
        rig = rig_of(Routing.LOAD_BALANCED, 2)
        rig.submit(prompt_len=8, max_tokens=40)
        rig.turn(0)
        for _ in range(5):
            rig.submit(prompt_len=8, max_tokens=40)
        rig.turn(0)
        rig.turn(0)
        assert rig.engines[0].num_admitted > 1


class TestPreferenceWhileFull:
    def full(self, routing: Routing, **changes) -> tuple[FleetRig, int]:
        """Return a rig with the shared prompt cached on 0, which is full, and 1 idle; a request."""
        rig = rig_of(routing, **changes)
        rig.submit(prompt=SHARED)
        while rig.core.has_pending_work():
            rig.turn(0)
        fill(rig, 0)
        return rig, rig.submit(prompt=with_tail(1))

    @pytest.mark.parametrize("routing", AFFINE)
    def test_a_request_waits_as_long_as_its_prefix_takes_to_compute(self, routing):
        """Sixteen tokens are saved; then it goes to any executor."""
        rig, _ = self.full(routing)
        arrived_s = rig.now
        assert 16 * START_S == pytest.approx(rig.core.next_deadline_s or 16 * START_S)
        rig.turn(1, 15 * START_S)
        assert not rig.engines[1].num_admitted
        assert arrived_s + 16 * START_S == pytest.approx(rig.core.next_deadline_s)
        rig.turn(1, 2 * START_S)
        assert 1 == rig.engines[1].num_admitted

    @pytest.mark.parametrize("routing", AFFINE)
    def test_it_waits_no_longer_than_the_cap(self, routing):
        """However slow prompts are to compute."""
        rig, _ = self.full(routing)
        rig.core._fleet[1].pace.prefill_s = 1.0
        rig.turn(1, MAX_AFFINITY_S * 0.99)
        assert not rig.engines[1].num_admitted
        rig.turn(1, MAX_AFFINITY_S * 0.02)
        assert 1 == rig.engines[1].num_admitted

    def test_an_aged_request_ignores_its_preference(self):
        """It goes to the first executor with room."""
        rig, _ = self.full(Routing.LONGEST_PREFIX, ageing_s=0.001)
        rig.core._fleet[1].pace.prefill_s = 1.0
        rig.turn(1, 0.009)
        assert not rig.engines[1].num_admitted
        rig.turn(1, 0.0011)
        assert 1 == rig.engines[1].num_admitted

    def test_a_request_that_saves_nothing_does_not_wait(self):
        """Its preference may be for an executor that has evicted all of its prompt."""
        rig, handle = self.full(Routing.LONGEST_PREFIX)
        rig.core.flush_prefix_cache()
        rig.turn(1, 0.0)
        assert handle not in rig.core.waiting_handles()

    @pytest.mark.parametrize("routing", [*AFFINE, Routing.ROUND_ROBIN])
    def test_an_affinity_that_expires_while_all_is_idle_wakes_the_loop(self, routing):
        """
        A driver that sleeps until `next_deadline_s` has the idle executor admit the request at that
        time and not a tick later, and is not woken again for nothing.
        """
        rig, handle = self.full(routing)
        # The executor that is full falls silent; nothing else happens.
        rig.turn(1, 0.0)
        if routing is Routing.ROUND_ROBIN and handle not in rig.core.waiting_handles():
            handle = rig.submit(prompt=with_tail(2))
            rig.turn(1, 0.0)
        num_admitted = rig.engines[1].num_admitted
        assert [handle] == rig.core.waiting_handles()
        due_s = rig.core.next_deadline_s
        assert rig.now < due_s <= rig.now + MAX_AFFINITY_S
        rig.turn(1, (due_s - rig.now) / 2)
        assert num_admitted == rig.engines[1].num_admitted
        rig.now = due_s
        rig.turn(1, 0.0)
        assert 1 + num_admitted == rig.engines[1].num_admitted
        assert rig.core.next_deadline_s is None

    def test_a_time_that_has_come_is_not_told_again(self):
        """Where no executor has room by then, the loop is woken once and not for ever."""
        rig, _ = self.full(Routing.LONGEST_PREFIX)
        rig.turn(1, 0.0)
        due_s = rig.core.next_deadline_s
        rig.core.expire(due_s)
        assert rig.core.next_deadline_s is None


class TestChoices:
    def test_choices_follow_the_first_that_is_admitted(self):
        """The others share its prompt there, though another executor is idle."""
        rig = rig_of(Routing.LOAD_BALANCED)
        rig.submit(prompt=with_tail(1, 2), num_choices=3, max_tokens=20)
        for number in [0, 1] * 6:
            rig.turn(number, 0.001)
        assert [3, 0] == [engine.num_admitted for engine in rig.engines.values()]
        rig.run()
        rig.check_outputs()

    @pytest.mark.parametrize("routing", [*AFFINE, Routing.LOAD_BALANCED])
    def test_more_choices_than_one_executor_holds(self, routing):
        """Those that do not fit wait for a moment and go on elsewhere, with right outputs."""
        rig = rig_of(routing, 3)
        rig.submit(prompt=with_tail(1, 2), num_choices=10, max_tokens=24)
        began_s = rig.now
        while rig.core.waiting_handles() and rig.now < began_s + 2 * MAX_AFFINITY_S:
            for number in range(3):
                rig.turn(number, 0.001)
        assert not rig.core.waiting_handles()
        assert 2 <= sum(engine.num_admitted > 0 for engine in rig.engines.values())
        rig.run()
        rig.check_outputs()


class TestOnlyTheLargeOne:
    def rig(self, **options) -> FleetRig:
        """Return a rig with a small executor, 0, and a large one, 1, which is full."""
        config = small_config(max_num_blocks=20)
        small = replace(geometry_of(config), num_blocks=6)
        rig = FleetRig([small, geometry_of(config)], options=CoreOptions(**options))
        rig.submit(prompt_len=40, max_tokens=20)
        rig.turn(1)
        return rig

    @pytest.mark.parametrize("routing", list(Routing))
    def test_an_aged_head_holds_up_no_other_executor(self, routing):
        """It waits for the large one, where none goes ahead of it; the small one goes on."""
        rig = self.rig(ageing_s=0.01, routing=routing)
        head = rig.submit(prompt_len=40, max_tokens=12)
        rig.now += 5.0
        others = [rig.submit(prompt_len=4, max_tokens=3) for _ in range(6)]
        ends_s = rig.now + MAX_AFFINITY_S + 1.0
        while not set(others) <= set(rig.ended):
            rig.turn(0)
            assert rig.now < ends_s
        assert [head] == rig.core.waiting_handles()
        rig.run()
        rig.check_outputs()

    @pytest.mark.parametrize("routing", list(Routing))
    @pytest.mark.parametrize("preempts", [False, True])
    def test_a_priority_head_holds_up_no_other_executor(self, routing, preempts):
        """The small one goes on with requests of worse priority."""
        rig = self.rig(priority_preemption=preempts, routing=routing)
        head = rig.submit(prompt_len=40, max_tokens=12, priority=-5)
        rig.now += MAX_AFFINITY_S
        others = [rig.submit(prompt_len=4, max_tokens=3, priority=3) for _ in range(6)]
        rig.now += MAX_AFFINITY_S
        while not set(others) <= set(rig.ended):
            assert rig.turn(0)
        assert [head] == rig.core.waiting_handles()
        rig.run()
        rig.check_outputs()


class TestEqualPrompts:
    @pytest.mark.slow
    @pytest.mark.parametrize("routing", list(Routing))
    def test_64_equal_new_prompts_at_once_on_4_executors(self, routing):
        """
        An executor computes the prompt once at most, waiting for it is each executor's own, and no
        executor idles beside the queue for longer than a preference lasts.
        """
        rig = rig_of(routing, 4, alpha=0.5, max_num_blocks=64)
        handles = [rig.submit(prompt=with_tail(1, 2, 3), max_tokens=12) for _ in range(64)]
        assert 64 == len(handles)
        idle_s = dict.fromkeys(rig.engines, 0.0)
        longest_s = 0.0
        while rig.core.waiting_handles():
            for number, engine in rig.engines.items():
                rig.turn(number, 0.002)
                is_idle = not engine.port.num_slots_in_use and rig.core.waiting_handles()
                idle_s[number] = idle_s[number] + 0.008 if is_idle else 0.0
                longest_s = max(longest_s, idle_s[number])
        assert longest_s <= MAX_AFFINITY_S + 0.01
        rig.run()

        rig.check_outputs()
        stats = rig.core.stats()
        num_computing = sum(engine.num_admitted > 0 for engine in rig.engines.values())
        assert stats.prefix_cache_hit_tokens >= (64 - num_computing) * 16


class TestReopening:
    def test_an_executor_is_full_no_more_when_another_admits_what_it_could_not(self):
        """It goes on with the queue, though none of its own requests has ended."""
        config = small_config(max_num_blocks=20)
        rig = FleetRig(2, config=config, options=CoreOptions(schedule_policy="fcfs"))
        rig.submit(prompt_len=40, max_tokens=20)
        rig.turn(0)
        head, tail = rig.submit(prompt_len=40, max_tokens=20), rig.submit(prompt_len=4)
        rig.now += MAX_AFFINITY_S
        for _ in range(8):
            rig.turn(0)
        assert rig.core._fleet[0].gate.is_full
        rig.turn(1)
        assert head not in rig.core.waiting_handles()
        assert not rig.core._fleet[0].gate.is_full
        rig.now += MAX_AFFINITY_S
        rig.turn(0)
        rig.turn(0)
        assert tail not in rig.core.waiting_handles()


class TestPace:
    def test_a_step_of_prompts_says_how_long_a_token_takes(self):
        """Time in the executor's queue does not count, nor do steps of few prompt tokens."""
        rig = rig_of(Routing.LOAD_BALANCED, max_total_tokens=256, max_model_len=200)
        rig.submit(prompt_len=100)
        rig.core.schedule(rig.now)
        rows = rig.core._replica.steps.in_flight[0]
        pace = Pace()
        pace.note_step(rows, StepTimings(queued_ns=5_000, total_ns=5_000 + 100_000_000))
        assert START_S + 0.2 * (0.001 - START_S) == pytest.approx(pace.prefill_s)
        was_s = pace.prefill_s
        pace.note_step(rows, StepTimings())
        pace.note_step(replace(rows, num_tokens=rows.num_tokens[:0]), StepTimings(total_ns=10**9))
        assert was_s == pace.prefill_s
