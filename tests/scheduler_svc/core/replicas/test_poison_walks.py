"""Any mix of deaths, losses and requests that kill, among several executors."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import ExecutorLost, PoisonRequest
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.harness import geometry_of, small_config
from tests.scheduler_svc.core.killing import NUM_PROGRESS
from tests.scheduler_svc.core.replicas.poison_rig import PoisonRig

MAX_UNKNOWN = 4
"""Most steps in flight at a death, of which more outputs than at the death may be forgiven."""


class WalkRig(PoisonRig):
    """Rig that keeps how far each request was at its deaths alone."""

    def __init__(self, *what, **changes) -> None:
        super().__init__(*what, **changes)
        self.died_alone: dict[int, list[int]] = defaultdict(list)

    def die(self, number: int, died_in: int = 0) -> None:
        """Let an executor die in a step in flight."""
        live = [one for one in self._in_flight[number][died_in] if self.core.find(one) is not None]
        if len(live) == len(self._in_flight[number][died_in]) == 1:
            self.died_alone[live[0]].append(len(self.outputs[live[0]]))
        super().die(number, died_in)

    def may_be_poison(self, handle: int) -> bool:
        """Return True when a request died alone twice without getting on in between."""
        deaths = self.died_alone[handle]
        bound = NUM_PROGRESS + MAX_UNKNOWN
        return any(after - before <= bound for before, after in pairwise(deaths))


def walk(seed: int, *, has_random_deaths: bool) -> WalkRig:
    """Run a mix of work, in which some requests kill, to its end."""
    source = random.Random(seed)
    config = small_config(max_num_blocks=source.choice([24, 48]))
    geometry = geometry_of(config, num_host_blocks=source.choice([0, 12]))
    options = CoreOptions(
        schedule_policy=source.choice(["fcfs", "lpm"]),
        preemption_mode=source.choice(list(PreemptionMode)),
        priority_preemption=source.random() < 0.3,
    )
    rig = WalkRig(
        [geometry] * source.randint(2, 4),
        config=config,
        delay=source.choice([1, 2, 4]),
        options=options,
    )
    rig.out_for_s = source.choice([0.0, 0.0, 0.5, 40.0])
    for _ in range(400):
        roll, number = source.random(), source.choice(list(rig.engines))
        if roll < 0.12 and rig.core.num_requests < 30:
            handle = rig.submit(
                prompt_len=source.randint(1, 12),
                max_tokens=source.randint(1, 20),
                num_choices=source.choice([1, 1, 1, 3]),
                priority=source.randint(-1, 1),
            )
            if source.random() < 0.1:
                rig.kills_at[handle] = source.randint(0, 20)
        elif roll < 0.13 and (live := set(rig.submitted) - set(rig.ended) - set(rig.failed)):
            rig.end(source.choice(sorted(live)))
        elif roll < 0.14:
            rig.forget_steps(number)
            rig.lose(number)
        elif roll < 0.15 and has_random_deaths and rig._in_flight.get(number):
            rig.die(number, source.randrange(len(rig._in_flight[number])))
        elif roll < 0.16 and has_random_deaths and rig._in_flight.get(number):
            lose_sight(rig, number, source)
        elif roll < 0.165 and len(rig.engines) > 2:
            rig.detach(max(rig.engines))
        elif roll < 0.17 and len(rig.engines) < 4:
            rig.attach(geometry)
        else:
            rig.turn(number)
    finish(rig, source)
    return rig


def lose_sight(rig: WalkRig, number: int, source: random.Random) -> None:
    """Let an executor fall silent, and be seen to have died, or to live, a little later."""
    port, boot_id = rig.engines[number].port, f"boot-{rig.now}"
    died_in = source.randrange(len(rig._in_flight[number]))
    handles = rig._in_flight[number][died_in]
    died = source.random() < 0.5
    if died and len(handles) == 1:
        (handle,) = handles
        rig.died_alone[handle].append(len(rig.outputs[handle]))
    rig.forget_steps(number)
    port.executor_lost(rig.now, died_in, may_live=boot_id)
    rig.engines[number].start_over()
    rig.collect()
    for _ in range(source.randint(0, 12)):
        rig.turn(source.choice([one for one in rig.engines if one != number]))
    port.executor_seen(boot_id, rig.now, died=died)
    rig.collect()


def finish(rig: WalkRig, source: random.Random) -> None:
    """Give turns until nothing is left, in longer strides, as executors may be away."""
    for _ in range(30_000):
        if not rig.core.has_pending_work():
            break
        rig.turn(source.choice(list(rig.engines)), 0.05)
    assert not rig.core.has_pending_work(), "work is left: something starves"
    assert not rig.core._cell.suspects.has_marks


def check_outputs(rig: WalkRig, failed: set[int]) -> None:
    """Check that all that did not fail have their whole output, or as far as they were aborted."""
    for handle in rig.submitted.keys() - failed:
        whole, found = rig.expected(handle), rig.outputs[handle]
        if rig.ended[handle].reason is FinishReason.CANCELLED:
            whole = whole[: len(found)]
        assert whole == found, f"the output of {handle} is wrong"


class TestWalks:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(8))
    def test_only_requests_that_kill_fail(self, seed):
        """All others end with the right tokens, whatever else is lost, joins and leaves."""
        rig = walk(seed, has_random_deaths=False)
        assert rig.failed.keys() <= rig.kills_at.keys()
        check_outputs(rig, set(rig.failed))
        for failure in rig.failed.values():
            assert isinstance(failure.error, PoisonRequest | ExecutorLost)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(8))
    def test_deaths_at_any_time_fail_none_that_did_not_die_alone_twice(self, seed):
        """So it is with any deaths, also those that are proven late."""
        rig = walk(100 + seed, has_random_deaths=True)
        for handle, failure in rig.failed.items():
            assert handle in rig.died_alone
            if isinstance(failure.error, PoisonRequest):
                assert rig.may_be_poison(handle)
        check_outputs(rig, set(rig.failed))

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", KvMode)
    def test_a_suspension_delays_no_poison_search_for_ever(self, mode):
        """Another executor takes suspects over, and all get on while the first is suspended."""
        rig = WalkRig(2, config=small_config(max_num_blocks=48), delay=2)
        for _ in range(8):
            rig.submit(prompt_len=6, max_tokens=20)
        rig.kills_at = {3: 9}
        while len(rig.deaths) < 2:
            for number in rig.engines:
                rig.turn(number)
        number = rig.core._cell.suspects.quarantine.number
        port = rig.engines[number].port
        rig.turn(number)
        while rig.engines[number].pending:
            rig.turn(number)
        port.suspend(mode, rig.now)
        (other,) = set(rig.engines) - {number}
        for _ in range(4000):
            rig.turn(other, 0.05)
        assert 3 in rig.failed
        assert rig.core.num_requests <= rig.engines[number].port._replica.slots.num_running
