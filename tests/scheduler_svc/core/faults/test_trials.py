"""Requests that executors die of: they fail, no other does, and everything else works meanwhile."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import FinishReason, RequestState
from tandem.errors import ExecutorLost, PoisonRequest
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config

BOLD = CoreOptions(schedule_conservativeness=0.0, track_request_events=True)
WIDE = small_config(max_num_blocks=128, max_batch_size=16, max_total_tokens=64)


def rig_with(count: int, *, delay: int = 1, max_tokens: int = 24, **changes) -> Rig:
    """Return a rig with `count` requests that all run at once."""
    rig = Rig(changes.pop("config", WIDE), delay=delay, options=changes.pop("options", BOLD))
    for _ in range(count):
        rig.submit(prompt_len=6, max_tokens=max_tokens, **changes)
    return rig


def accused(count: int = 4, *, config=WIDE) -> Rig:
    """Return a rig of which the first requests were in two steps that died, and are suspects."""
    rig = rig_with(count, config=config)
    for _ in range(2):
        while len(rig.core._replica.steps.in_flight) == 0:
            rig.plan()
        rig.lose_executor(died_in=0)
    return rig


def check_only_failed(rig: Rig, failed: set[int]) -> None:
    """Check that these fail as poison and that all others have every token."""
    assert failed == set(rig.failed)
    assert all(isinstance(rig.failed[handle].error, PoisonRequest) for handle in failed)
    for handle in rig.submitted.keys() - failed:
        assert rig.expected(handle) == rig.outputs[handle]
    assert not rig.core._cell.suspects.has_marks


class TestKillers:
    @pytest.mark.parametrize("delay", [1, 2, 4, 8])
    @pytest.mark.parametrize("position", [0, 5, 6, 14], ids=["start", "last", "first", "ninth"])
    def test_a_request_that_kills_fails_and_no_other_does(self, delay, position):
        """
        A request that executors die of, by its prompt or its n-th output token and with any number
        of steps in flight, fails as poison, and the others produce every token.
        """
        rig = rig_with(10, delay=delay)
        rig.deaths.kills_at = {4: position}
        rig.run()
        check_only_failed(rig, {4})
        assert rig.expected(4)[: max(position - 5, 0)] == rig.outputs[4]
        assert len(rig.deaths.in_step) <= 4 + 4

    @pytest.mark.parametrize("delay", [1, 4])
    @pytest.mark.parametrize("kills_at", [{0: 3, 1: 3}, {2: 9, 7: 3, 9: 12}, {3: 0, 4: 25, 5: 25}])
    def test_several_fail_one_after_the_other(self, delay, kills_at):
        """
        Several requests that kill, at once or late, all fail and no other does.
        """
        rig = rig_with(10, delay=delay)
        rig.deaths.kills_at = dict(kills_at)
        rig.run()
        check_only_failed(rig, set(kills_at))

    @pytest.mark.parametrize("position", [3, 5, 6, 14])
    @pytest.mark.parametrize("run_ahead", [1, 8])
    def test_one_that_kills_in_a_step_not_known_is_found_too(self, position, run_ahead):
        """
        A request that kills is found also where an older step is blamed, since the results before
        the one that died are lost with it: steps go one at a time until all have got on.
        """
        options = CoreOptions(window=4, run_ahead=run_ahead, schedule_conservativeness=0.0)
        rig = rig_with(6, options=options)
        rig.usual_step_s, rig.loses_results = 0.001, True
        for _ in range(3):
            rig.step()
        rig.submit(prompt_len=6, max_tokens=24)
        rig.deaths.kills_at = {6: position}
        rig.run()
        check_only_failed(rig, {6})

    def test_a_choice_that_kills_fails_alone(self):
        """
        Only the choice that kills fails, and not the other choices of its request.
        """
        rig = rig_with(2)
        first = rig.submit(prompt_len=9, max_tokens=20, num_choices=3)
        rig.deaths.kills_at = {first + 1: 12}
        rig.run()
        check_only_failed(rig, {first + 1})

    @pytest.mark.parametrize("mode", PreemptionMode)
    def test_memory_may_be_short_meanwhile(self, mode):
        """
        Trials work while requests are preempted for want of blocks.
        """
        config = small_config(max_num_blocks=12)
        options = CoreOptions(schedule_conservativeness=0.0, preemption_mode=mode)
        rig = Rig(config, delay=2, options=options, geometry=geometry_of(config, 8, 16))
        for _ in range(6):
            rig.submit(prompt_len=6, max_tokens=20)
        rig.deaths.kills_at = {2: 17, 3: 8}
        rig.run()
        check_only_failed(rig, {2, 3})
        assert rig.core.stats().preemptions

    def test_one_slot_is_enough(self):
        """
        No other request fails where one runs at a time and every death is of one alone.
        """
        rig = rig_with(5, config=small_config(max_batch_size=1))
        rig.deaths.kills_at = {1: 8, 3: 2}
        rig.run()
        check_only_failed(rig, {1, 3})

    def test_the_failure_says_what_to_do(self):
        """
        The error names the request, what happened and what to do, and is INTERNAL.
        """
        rig = rig_with(1)
        rig.deaths.kills_at = {0: 3}
        rig.run()
        error = rig.failed[0].error
        assert ("POISON_REQUEST", "INTERNAL", None) == (
            error.reason,
            error.code,
            error.retry_after_s,
        )
        assert "executors died twice while they computed request r0 and nothing" in error.message
        assert "report it" in error.message


class TestBlame:
    def test_only_the_step_that_was_running_is_blamed(self):
        """
        Only the step that was running is blamed, not those in flight before or after it.
        """
        rig = Rig(WIDE, options=BOLD)
        for _ in range(3):
            rig.submit(prompt_len=6)
            rig.plan()
        rig.lose_executor(died_in=1)
        assert [frozenset({0, 1})] == rig.deaths.in_step
        assert [0, 1] == [mark.request.number for mark in rig.core._cell.suspects.marks()]
        rig.run()

    @pytest.mark.parametrize(
        ("died_in", "cleared_at"), [(0, 6 - 1 + 8), (1, 8), (7, 6 + 7), (9, 6 + 9)]
    )
    def test_what_was_in_flight_is_to_be_passed(self, died_in, cleared_at):
        """
        A request is trusted again after eight tokens, of which a prompt counts as one, but never
        after fewer than were in flight up to the step that died.
        """
        rig = rig_with(1)
        for _ in range(10):
            rig.plan()
        rig.lose_executor(died_in)
        (mark,) = rig.core._cell.suspects.marks()
        assert cleared_at == mark.cleared_at
        rig.run()

    @pytest.mark.parametrize("num_steps", [1, 5])
    def test_a_decode_has_to_get_eight_tokens_further(self, num_steps):
        """
        A request that decodes is trusted again eight tokens past those computed at the death.
        """
        rig = rig_with(1)
        for _ in range(num_steps):
            rig.step()
        rig.plan()
        rig.lose_executor(died_in=0)
        (mark,) = rig.core._cell.suspects.marks()
        assert 6 + num_steps - 1 + 8 == mark.cleared_at
        rig.run()

    @pytest.mark.parametrize("died_in", [None, 3, 99])
    def test_no_step_no_blame(self, died_in):
        """
        A loss without a step that was running, or with one that is not known, blames no request.
        """
        rig = rig_with(3)
        for _ in range(3):
            rig.plan()
        rig.lose_executor(died_in)
        assert not rig.core._cell.suspects.has_marks
        assert 0 == rig.core.stats().executor_deaths
        rig.run()

    def test_who_drains_is_blamed_and_who_ended_is_not(self):
        """
        A row counts against a request that was preempted meanwhile, and against none that ended.
        """
        rig = rig_with(3)
        rig.step()
        rig.plan()
        rig.core.preempt("r1")
        rig.core.end_request("r2", FinishReason.CANCELLED, rig.now)
        rig.collect()
        rig.lose_executor(died_in=0)
        assert [0, 1] == [mark.request.number for mark in rig.core._cell.suspects.marks()]
        rig.run()

    def test_who_shared_the_step_with_one_that_ended_did_not_die_alone(self):
        """
        A request that shared both its deaths with one that ended is no poison: the other may be.
        """
        rig = rig_with(2)
        for other in ("r0", "r2"):
            rig.plan()
            rig.core.end_request(other, FinishReason.CANCELLED, rig.now)
            rig.lose_executor(died_in=0)
            if other == "r0":
                rig.submit(prompt_len=6, max_tokens=24)
        mark = next(mark for mark in rig.core._cell.suspects.marks() if mark.request.number == 1)
        assert (2, 0) == (mark.deaths, mark.deaths_alone)
        rig.run()

    def test_a_suspension_in_flight_blames_nobody(self):
        """
        An executor that dies on a command blames no request.
        """
        rig = rig_with(2)
        rig.step()
        rig.core.suspend(KvMode.PERSIST, rig.now)
        rig.plan()
        rig.lose_executor(died_in=0)
        assert not rig.core._cell.suspects.has_marks
        assert 1 == rig.core.stats().executor_deaths
        rig.core.resume()
        rig.run()

    def test_progress_clears(self):
        """
        A request with eight tokens more than at a death is trusted: its next one counts as a first.
        """
        rig = rig_with(2)
        rig.plan()
        rig.lose_executor(died_in=0)
        for _ in range(7):
            rig.step()
        assert rig.core._cell.suspects.has_marks
        rig.step()
        assert not rig.core._cell.suspects.has_marks
        rig.plan()
        rig.lose_executor(died_in=0)
        assert 0 == rig.core.stats().suspected_requests
        rig.run()


class TestCaution:
    def test_one_step_at_a_time_until_all_have_got_on(self):
        """
        One step at a time is in flight after a death until no request has a mark.
        """
        rig = rig_with(2)
        rig.plan()
        assert 2 == rig.core.lookahead(1.0)
        rig.lose_executor(died_in=0)
        assert 1 == rig.core.lookahead(1.0)
        while rig.core._cell.suspects.has_marks:
            assert 1 == rig.core.lookahead(1.0)
            rig.step()
        assert 2 == rig.core.lookahead(1.0)
        rig.run()

    def test_who_waits_long_with_a_mark_slows_nobody_down(self):
        """
        A mark that is not cleared for long keeps requests at one step in flight for 64 results
        only.
        """
        rig = rig_with(2, config=small_config(max_batch_size=2, max_model_len=120), max_tokens=100)
        rig.plan()
        rig.lose_executor(died_in=0)
        rig.core.end_handle(1, FinishReason.CANCELLED, rig.now)
        rig.core._cell.suspects.marks()[0].cleared_at = rig.deaths.forgiven_at[0] = 1000
        for _ in range(64):
            assert 1 == rig.core.lookahead(1.0)
            rig.step()
        assert 2 == rig.core.lookahead(1.0)
        rig.run()


class TestTrial:
    def test_only_the_tried_run_and_one_step_at_a_time(self):
        """
        Only half of the suspects run while there are any, with one step at a time in flight.
        """
        rig = accused(4)
        rig.submit(prompt_len=6)
        assert (4, 1) == (rig.core.stats().suspected_requests, rig.core.lookahead(0.001))
        batch = rig.plan()
        assert {0, 1} == {
            int(rig.core._replica.slots.admitted.handle[slot]) for slot in batch.row_slot
        }
        assert rig.core.schedule(rig.now) is None
        assert [2, 3, 4] == sorted(rig.core.waiting_handles())
        rig.run()
        check_only_failed(rig, set())

    def test_the_other_half_has_its_turn_and_then_all_run(self):
        """
        A request that passed a trial makes way for the next trial, and all run again when all have
        passed.
        """
        rig = accused(4)
        seen = []
        while rig.core.stats().suspected_requests:
            rig.step()
            if (tried := sorted(rig.core._cell.suspects.trial)) and tried not in seen:
                seen.append(tried)
        assert [[0, 1], [2], [3]] == seen
        rig.step()
        rig.step()
        assert 4 == rig.core._replica.slots.num_running
        rig.run()
        check_only_failed(rig, set())

    def test_a_lost_connection_does_not_end_it(self):
        """
        A loss that blames no request leaves the same requests in the trial.
        """
        rig = accused(4)
        rig.plan()
        rig.lose_executor()
        assert [0, 1] == sorted(rig.core._cell.suspects.trial)
        rig.plan()
        assert 2 == rig.core._replica.slots.num_running
        rig.run()

    def test_another_executor_does_not_end_it(self):
        """
        Suspects stay suspects on another executor.
        """
        rig = accused(4)
        rig.use_geometry(geometry_of(WIDE, 20))
        assert 4 == rig.core.stats().suspected_requests
        rig.run()
        check_only_failed(rig, set())

    @pytest.mark.parametrize("handle", [0, 3], ids=["tried", "waiting"])
    def test_an_abort_works_in_it(self, handle):
        """
        A suspect that is tried or waits for a trial can be ended, and is no suspect any more.
        """
        rig = accused(4)
        rig.plan()
        rig.core.end_handle(handle, FinishReason.CANCELLED, rig.now)
        rig.collect()
        assert 3 == rig.core.stats().suspected_requests
        rig.run()
        assert FinishReason.CANCELLED == rig.ended[handle].reason

    def test_a_deadline_works_in_it(self):
        """
        A request that waits during a trial ends at its deadline.
        """
        rig = rig_with(4)
        late = rig.submit(prompt_len=6, max_tokens=20, deadline_s=rig.now + 5)
        for _ in range(2):
            rig.plan()
            rig.lose_executor(died_in=0)
        for _ in range(6):
            rig.step()
        assert FinishReason.DEADLINE == rig.ended[late].reason
        assert rig.core.stats().suspected_requests
        rig.run()

    @pytest.mark.parametrize("mode", KvMode)
    def test_a_suspension_works_in_it(self, mode):
        """
        A service that is suspended during a trial goes on with it when it is resumed.
        """
        rig = accused(4)
        rig.step()
        rig.core.suspend(mode, rig.now)
        for _ in range(3):
            rig.step()
        assert rig.core.schedule(rig.now) is None
        rig.core.resume()
        rig.run()
        check_only_failed(rig, set())

    def test_a_preemption_works_in_it(self):
        """
        A tried request that loses its slot gets one again before any other request.
        """
        rig = accused(4)
        rig.step()
        rig.core.preempt("r0")
        rig.step()
        rig.step()
        assert RequestState.DECODE is rig.core.state_of(0)
        assert RequestState.WAITING is rig.core.state_of(2)
        rig.run()
        check_only_failed(rig, set())

    def test_priority_takes_no_slot_in_it(self):
        """
        A request of better priority waits like all others while suspects are tried.
        """
        config = small_config(max_batch_size=2)
        options = CoreOptions(priority_preemption=True, schedule_conservativeness=0.0)
        rig = Rig(config, options=options)
        for _ in range(2):
            rig.submit(prompt_len=6, max_tokens=24)
        for _ in range(2):
            rig.plan()
            rig.lose_executor(died_in=0)
        rig.step()
        urgent = rig.submit(prompt_len=6, priority=-5)
        for _ in range(3):
            rig.step()
        assert RequestState.WAITING is rig.core.state_of(urgent)
        assert RequestState.DECODE is rig.core.state_of(0)
        rig.run()
        check_only_failed(rig, set())

    def test_who_has_waited_long_does_not_stand_in_its_way(self):
        """
        Requests that have waited so long that no later one may overtake them are passed by a trial.
        """
        options = CoreOptions(ageing_s=0.1, schedule_conservativeness=0.0)
        rig = rig_with(3, config=small_config(max_batch_size=2), options=options)
        rig.now += 10
        rig.step()
        for _ in range(2):
            rig.plan()
            rig.lose_executor(died_in=0)
        while rig.core.stats().suspected_requests:
            rig.step()
        rig.run()
        check_only_failed(rig, set())


class TestUnluckyExecutors:
    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("delay", [1, 2, 4, 8])
    def test_kills_that_are_nobody_s_fault_fail_nobody(self, seed, delay):
        """
        Executors that are killed at random, each after all requests of the last such step have got
        on, make no request fail.
        """
        generator = random.Random(seed)
        rig = rig_with(8, delay=delay, max_tokens=40)
        for _ in range(30):
            for _ in range(generator.randrange(10, 16) + delay):
                rig.step()
            if rig.pending:
                rig.lose_executor(generator.randrange(len(rig.pending)))
        rig.run()
        check_only_failed(rig, set())

    @pytest.mark.parametrize("seed", range(5))
    def test_kills_at_any_time_fail_nobody_who_did_not_die_alone_twice(self, seed):
        """
        A request fails only after it died alone, and as poison only after it did so twice without
        getting on in between, however often executors are killed; all others produce every token.
        """
        generator = random.Random(seed)
        rig = rig_with(8, delay=generator.choice([1, 2, 4, 8]))
        for _ in range(60):
            for _ in range(generator.randrange(12)):
                rig.step()
            if rig.pending:
                rig.lose_executor(generator.randrange(len(rig.pending)))
        rig.run()
        for handle in rig.submitted:
            failure = rig.failed.get(handle)
            if failure is None:
                assert rig.expected(handle) == rig.outputs[handle]
            elif isinstance(failure.error, PoisonRequest):
                assert rig.deaths.may_be_poison(handle)
            else:
                assert rig.deaths.died_alone[handle]

    def test_an_executor_that_dies_of_anything_is_blamed_itself(self):
        """
        Requests fail as EXECUTOR_LOST, which may be tried elsewhere, where every step dies, and
        only the last few that are left over fail as poison.
        """
        rig = rig_with(16)
        for _ in range(200):
            if rig.core.num_requests:
                rig.plan()
                rig.lose_executor(died_in=0)
        errors = [type(failed.error) for failed in rig.failed.values()]
        assert (16, 0) == (len(errors), rig.core.num_requests)
        assert errors.count(PoisonRequest) < 4
        lost = next(f.error for f in rig.failed.values() if isinstance(f.error, ExecutorLost))
        assert "try again later, or another replica" in lost.message
        assert lost.retry_after_s
