"""Requests that executors die of, among several: one executor dies of them again and again at most."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.faults.out_of_memory import FAILS_AT
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.state.quarantine import CAUTIOUS_STEPS, PATIENCE_S
from scheduler_svc.core.state.suspects import BROKEN_AT
from tandem.errors import ExecutorLost, PoisonRequest
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import geometry_of
from tests.scheduler_svc.core.replicas.poison_rig import WIDE, PoisonRig

POSITIONS = {"start": 0, "last": 5, "first": 6, "ninth": 14}
"""Positions that kill, by name: of the prompt the first and the last, of the output two others."""


def rig_with(count: int, num_executors: int = 4, *, max_tokens: int = 24, **changes) -> PoisonRig:
    """Return a rig with `count` requests."""
    rig = PoisonRig(num_executors, **changes)
    for _ in range(count):
        rig.submit(prompt_len=6, max_tokens=max_tokens)
    return rig


def until(rig: PoisonRig, is_done, limit: int = 4000, seconds: float = 0.01) -> None:
    """Give turns to all executors until something is so."""
    for at in range(limit):
        if is_done():
            return
        numbers = list(rig.engines)
        rig.turn(numbers[at % len(numbers)], seconds)
    raise AssertionError("it never came to that")


def with_first_death(count: int = 16, *, position: int = 8) -> tuple[PoisonRig, int]:
    """Return a rig in which request 0 has just killed one executor, and the number of that."""
    rig = rig_with(count)
    rig.kills_at = {0: position}
    until(rig, lambda: rig.deaths)
    return rig, rig.deaths[0][0]


class TestBound:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("position", "delay", "num_executors"),
        [
            pytest.param(position, delay, (2, 4)[(row + column) % 2], id=f"{name}-{delay}")
            for row, (name, position) in enumerate(POSITIONS.items())
            for column, delay in enumerate((1, 2, 4))
        ],
    )
    def test_one_executor_at_most_dies_again(self, num_executors, delay, position):
        """
        A request that kills takes one executor away by its first death, and then the quarantined
        one only; it fails as poison and all others have every token.
        """
        rig = rig_with(24, num_executors, delay=delay)
        rig.kills_at = {4: position}
        rig.run()

        rig.check_only_failed({4})
        assert 1 == len(set(rig.poisoned_by[4][1:]))
        assert len(rig.deaths) <= 1 + 1 + 3 + 3  # as for one executor, of eight requests at once

    @pytest.mark.slow
    @pytest.mark.parametrize("kills_at", [{0: 3, 1: 3}, {2: 9, 7: 3, 20: 12}, {3: 0, 4: 25, 5: 25}])
    def test_several_that_kill_fail_and_no_other_does(self, kills_at):
        """Each of them dies on at most one executor more than once while it is quarantined."""
        rig = rig_with(24, delay=2)
        rig.kills_at = dict(kills_at)
        rig.run()

        rig.check_only_failed(set(kills_at))

    @pytest.mark.slow
    def test_others_hardly_notice(self):
        """While suspects are tried, requests without marks run on the other executors."""
        rig = rig_with(24, delay=2)
        rig.kills_at = {4: 8}
        during = Counter[int]()
        while rig.core.has_pending_work():
            for number in list(rig.engines):
                rig.turn(number)
                if rig.core.stats().suspected_requests:
                    during[number] += bool(rig.running(number))
        quarantined = rig.deaths[-1][0]
        assert all(during[number] for number in set(rig.engines) - {quarantined})

    @pytest.mark.slow
    def test_a_restart_of_a_minute_takes_few_executors_away(self):
        """
        Suspects wait for the quarantined executor, ever longer each time: of four executors that
        stay away for a minute each time, at most three are away at once.
        """
        rig = rig_with(16, delay=2)
        rig.kills_at, rig.out_for_s = {4: 8}, 60.0
        most_away = 0
        for at in range(12_000):
            if not rig.core.has_pending_work():
                break
            rig.turn(at % 4, 0.1)
            most_away = max(most_away, sum(back > rig.now for back in rig._back_at.values()))
        rig.check_only_failed({4})
        assert most_away <= 3


class TestQuarantine:
    def test_marked_requests_wait_for_the_quarantined_executor(self):
        """Others admit none of them, and are not cautious."""
        rig, dead = with_first_death()
        marked = rig.marked()
        assert dead == rig.core._cell.suspects.quarantine.number
        rig.turn(dead)
        others = set(rig.engines) - {dead}
        for number in others:
            rig.turn(number)
            assert not rig.running(number) & marked
            assert 2 == rig.engines[number].port.lookahead(0.02)
        assert 1 == rig.engines[dead].port.lookahead(0.02)
        rig.run()
        rig.check_only_failed({0})

    def test_unmarked_ones_run_beside_marked_ones(self):
        """Before there are suspects, the quarantined executor runs both, a step at a time."""
        rig = rig_with(4, num_executors=2, max_tokens=40)
        until(rig, lambda: rig.running(0))
        rig.turn(0)
        rig.die(0)
        rig.turn(0)
        marked = rig.marked()
        assert marked
        for _ in range(8):
            rig.submit(prompt_len=6, max_tokens=24)
        for _ in range(5):
            rig.turn(0)
        assert rig.running(0) & marked
        assert rig.running(0) - marked
        rig.run()
        rig.check_only_failed(set())

    def test_another_takes_over_at_once_while_nobody_is_suspected(self):
        """Requests of one death go on elsewhere while their executor is away."""
        rig, dead = with_first_death()
        rig._back_at[dead] = 1e9
        marked = rig.marked()
        until(rig, lambda: rig.core._cell.suspects.quarantine.number != dead, limit=200)
        number = rig.core._cell.suspects.quarantine.number
        assert rig.running(number) & marked

    def test_a_suspect_waits_for_a_while(self):
        """An executor that stays away after a second death is waited for, but not for ever."""
        rig, _ = with_first_death()
        until(rig, lambda: len(rig.deaths) == 2)
        second = rig.deaths[1][0]
        assert rig.core.stats().suspected_requests
        rig._back_at[second] = 1e9
        at, others = rig.now, [number for number in rig.engines if number != second]
        while rig.core._cell.suspects.quarantine.number == second:
            for number in others:
                rig.turn(number, 0.25)
        assert PATIENCE_S <= rig.now - at <= PATIENCE_S + 2
        assert {0} <= rig.marked()

    @pytest.mark.slow
    def test_an_executor_that_leaves_is_waited_for_like_one_that_is_away(self):
        """It may have been taken out of the list only because it died."""
        rig, _ = with_first_death()
        until(rig, lambda: len(rig.deaths) == 2)
        rig.detach(rig.deaths[1][0])
        at = rig.now
        until(rig, lambda: rig.core._cell.suspects.quarantine.number is not None)
        assert rig.now - at >= PATIENCE_S

    def test_a_suspended_one_is_replaced(self):
        """Requests with marks do not wait for an operator."""
        rig, dead = with_first_death()
        rig.turn(dead)
        rig.engines[dead].port.suspend(KvMode.PERSIST, rig.now)
        others = [number for number in rig.engines if number != dead]
        for at in range(60):
            rig.turn(others[at % 3])
        assert dead != rig.core._cell.suspects.quarantine.number

    @pytest.mark.slow
    def test_a_full_one_is_replaced(self):
        """Where better priorities took all its slots, one that has room takes over."""
        rig = rig_with(3, num_executors=2, max_tokens=40)
        until(rig, lambda: rig._in_flight.get(0))
        rig.die(0)
        marked = rig.marked()
        suspects, replica = rig.core._cell.suspects, rig.engines[0].port._replica
        replica.gate.note_back()
        for _ in range(30):
            rig.submit(prompt_len=6, max_tokens=40, priority=-5)
        for _ in range(8):
            rig.turn(0)
        assert not replica.slots.num_free()
        assert not rig.running(0) & marked
        rig.attach()
        until(rig, lambda: suspects.quarantine.number == 2, limit=30)
        rig.run()
        rig.check_only_failed(set())

    @pytest.mark.slow
    def test_a_death_elsewhere_does_not_disturb_the_trial(self):
        """Its requests get a mark each and wait, and the trial goes on."""
        rig = rig_with(24, delay=2)
        rig.kills_at = {4: 8}
        until(rig, lambda: rig.core._cell.suspects.trial)
        suspects = rig.core._cell.suspects
        quarantined = suspects.quarantine.number
        until(rig, lambda: any(rig._in_flight.get(n) for n in rig.engines if n != quarantined))
        trial = set(suspects.trial)
        other = next(n for n in rig.engines if n != quarantined and rig._in_flight.get(n))
        rig.die(other)
        assert trial == set(suspects.trial)
        assert rig.deaths[-1][1] <= rig.marked()
        rig.run()
        rig.check_only_failed({4})

    def test_a_control_comes_from_another_executor(self):
        """A request that runs elsewhere is preempted and shows that the quarantined one lives."""
        rig = rig_with(2, num_executors=2, max_tokens=50)
        rig.kills_at = {0: 8}
        rig.run()

        rig.check_only_failed({0})
        assert 3 <= len(rig.deaths) <= 4


class TestProof:
    def test_a_death_proven_late_confines_who_runs_elsewhere(self):
        """Its requests stay where they run by then, and others wait for that executor."""
        rig = rig_with(2, num_executors=2, max_tokens=40)
        until(rig, lambda: rig._in_flight.get(0))
        handles = rig._in_flight[0][0]
        rig.engines[0].port.executor_lost(rig.now, 0, may_live="boot-0")
        rig.forget_steps(0)
        rig.engines[0].start_over()
        while not handles <= rig.running(1):
            rig.turn(1)
        rig.engines[0].port.executor_seen("boot-0", rig.now, died=True)
        rig.collect()
        assert 1 == rig.core._cell.suspects.quarantine.number
        assert handles == rig.marked()
        assert handles <= rig.running(1)
        rig.run()
        rig.check_only_failed(set())


class TestBroken:
    @pytest.mark.parametrize("num_executors", [2, 4])
    @pytest.mark.parametrize("count", [3, 12])
    def test_nobody_fails_while_another_executor_lives(self, num_executors, count):
        """An executor that dies of anything runs one request at a time at last."""
        rig = rig_with(count, num_executors, max_tokens=30, delay=2)
        rig.broken = {1}
        rig.run()

        rig.check_only_failed(set())

    def test_a_quarantined_executor_that_dies_of_anything_loses_its_requests(self):
        """Those that died alone on it are tried on another, and get on there."""
        rig = rig_with(12, num_executors=2, max_tokens=30)
        rig.broken = {0, 1}
        until(rig, lambda: rig.core._cell.suspects.quarantine.broken)
        (number,) = rig.core._cell.suspects.quarantine.broken
        rig.broken = {number}
        assert not rig.failed
        assert not rig.core.stats().suspected_requests
        assert 1 == rig.engines[number].port._replica.room.max_rows
        rig.run()
        rig.check_only_failed(set())

    @pytest.mark.parametrize("num_executors", [2, 3, 4])
    def test_where_all_die_of_anything_requests_fail(self, num_executors):
        """No request bounces for ever: an executor is blamed instead of it once for each other."""
        count = 2 * BROKEN_AT
        rig = rig_with(count, num_executors, max_tokens=8)
        rig.broken = set(rig.engines)
        until(rig, lambda: not rig.core.has_pending_work(), seconds=0.25)
        errors = Counter(type(failed.error) for failed in rig.failed.values())
        assert count == errors.total()
        assert errors[PoisonRequest] < BROKEN_AT
        assert BROKEN_AT <= errors[ExecutorLost]
        assert len(rig.deaths) <= num_executors * count + 2 * count

    @pytest.mark.parametrize("position", [3, 8])
    @pytest.mark.parametrize("num_executors", [2, 4])
    def test_a_lone_killer_is_told_from_a_broken_executor_by_a_second_one(
        self, num_executors, position
    ):
        """Without a control, one more death alone on another executor shows which it is."""
        rig = rig_with(1, num_executors)
        rig.kills_at = {0: position}
        rig.run()
        rig.check_only_failed({0})
        repeated = [number for number, count in Counter(rig.poisoned_by[0]).items() if count > 1]
        assert len(repeated) <= 1
        assert 2 <= len(rig.deaths) <= 3

    def test_one_that_got_on_is_trusted_again(self):
        """After some steps it may be quarantined, and runs as many requests as before."""
        rig = rig_with(0, num_executors=2)
        replica = rig.engines[1].port._replica
        quarantine = rig.core._cell.suspects.quarantine
        quarantine.note_broken(1, 0)
        replica.room.run_one(0)
        for _ in range(12):
            rig.submit(prompt_len=6, max_tokens=40)
        rig.run()
        assert replica.steps.num_done >= CAUTIOUS_STEPS
        assert not quarantine.is_broken(1, replica.steps.num_done)
        assert replica.room.max_rows is None
        rig.check_only_failed(set())


class TestSizes:
    def test_a_large_marked_request_waits_for_an_executor_that_can_hold_it(self):
        """The quarantine moves to it once older ones have got on."""
        small = replace(geometry_of(WIDE), num_blocks=8)
        rig = PoisonRig([small, geometry_of(WIDE)])
        short = rig.submit(prompt_len=6, max_tokens=20)
        long = rig.submit(prompt=np.arange(40, dtype=np.int32), max_tokens=20)
        until(rig, lambda: rig._in_flight.get(1))
        rig.die(1)
        rig.run()

        rig.check_only_failed(set())
        assert {short, long} == set(rig.ended)

    def test_a_request_without_memory_tries_the_largest_executor(self):
        """It fails there at last, or gets on."""
        small = replace(geometry_of(WIDE), num_blocks=32)
        rig = PoisonRig([small, geometry_of(WIDE)])
        handle = rig.submit(prompt_len=6, max_tokens=20)
        for _ in range(FAILS_AT):
            until(rig, lambda: rig.engines[0].pending or not rig.turn(0))
            while not rig.engines[0].pending:
                rig.turn(0)
            rig.forget_steps(0)
            rig.engines[0].port.executor_lost(rig.now, 0, out_of_memory=True)
            rig.engines[0].start_over()
            rig.collect()
        assert not rig.failed
        for _ in range(10):
            rig.turn(0)
        assert not rig.running(0)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]

    def test_it_fails_once_the_largest_lacks_memory_too(self):
        """After as many small steps there."""
        small = replace(geometry_of(WIDE), num_blocks=32)
        rig = PoisonRig([small, geometry_of(WIDE)])
        handle = rig.submit(prompt_len=6, max_tokens=20)
        num_failures = 0
        while handle not in rig.failed:
            for number, engine in rig.engines.items():
                rig.turn(number)
                if engine.pending:
                    rig.forget_steps(number)
                    engine.port.executor_lost(rig.now, 0, out_of_memory=True)
                    engine.start_over()
                    rig.collect()
                    num_failures += 1
        rig.check_out_of_memory({handle})
        assert num_failures <= 2 * FAILS_AT

    def test_it_goes_back_where_the_largest_has_left(self):
        """No request waits for an executor that is gone."""
        small = replace(geometry_of(WIDE), num_blocks=32)
        rig = PoisonRig([small, geometry_of(WIDE)])
        handle = rig.submit(prompt_len=6, max_tokens=20)
        request = next(iter(rig.core._cell.requests))
        request.setbacks.leave_to(rig.engines[1].port.limits.num_blocks)
        assert not rig.engines[0].port._replica.can_ever_take(request)
        rig.detach(1)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]
        assert FinishReason.MAX_TOKENS is rig.ended[handle].reason
