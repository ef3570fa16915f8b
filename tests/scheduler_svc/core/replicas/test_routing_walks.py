"""Random work under every routing policy, with executors that come and go, and bounds on waiting."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.batch import routing as routing_module
from scheduler_svc.core.batch.routing import MAX_AFFINITY_S
from scheduler_svc.core.queue.queue import AGED_AFTER
from scheduler_svc.core.request.options import CoreOptions, PreemptionMode, Routing
from tests.scheduler_svc.core.harness import geometry_of, small_config
from tests.scheduler_svc.core.replicas.fleet_rig import FleetRig

TURN_S = 0.01
SHARED = np.arange(16, dtype=np.int32) % 50
"""Prompt of four blocks that many requests begin with."""


class Walk:
    """One random walk; an executor that is away plans nothing until it is back."""

    def __init__(
        self, routing: Routing, seed: int, turns_s: tuple[float, ...] = (0.001, 0.01, 0.1)
    ) -> None:
        source = random.Random(seed)
        self.turns_s = turns_s
        self.source = source
        config = small_config(max_num_blocks=source.choice([17, 24, 32]))
        options = CoreOptions(
            routing=routing,
            prefix_caching_routing_alpha=source.choice([0.0, 0.5, 1.0]),
            prefix_caching=source.random() < 0.8,
            schedule_policy=source.choice(["fcfs", "lpm", "dfs-weight", "lof"]),
            preemption_mode=source.choice(list(PreemptionMode)),
            priority_preemption=source.random() < 0.3,
            ageing_s=source.choice([0.02, 5.0]),
        )
        num_host = source.choice([0, 12])
        self.geometry = geometry_of(config, num_host_blocks=num_host)
        sizes = [self.geometry] * source.randint(1, 4)
        # One executor, the first, may be smaller than the others.
        if len(sizes) > 1 and source.random() < 0.4:
            sizes[0] = replace(self.geometry, num_blocks=12)
        self.rig = FleetRig(sizes, config=config, delay=source.choice([1, 2, 4]), options=options)
        self.away: set[int] = set()

    def run(self, num_moves: int) -> None:
        """Make random moves, then let all executors be back and end what is left."""
        for _ in range(num_moves):
            self._move()
        self.away.clear()
        self.rig.run(self.source)
        self.rig.check_outputs()
        assert not self.rig.core._cell.router._routes, "a route is left of a request that ended"
        assert self.rig.core.next_deadline_s is None

    def _move(self) -> None:
        source, rig = self.source, self.rig
        roll, numbers = source.random(), list(rig.engines)
        if roll < 0.12 and rig.core.num_requests < 40:
            self._submit()
        elif roll < 0.14 and (live := set(rig.submitted) - set(rig.ended)):
            rig.end(source.choice(sorted(live)))
        elif roll < 0.155:
            number = source.choice(numbers)
            rig.lose(number)
            if source.random() < 0.6:
                self.away.add(number)
        elif roll < 0.17 and self.away:
            self.away.discard(source.choice(sorted(self.away)))
        elif roll < 0.18 and self._may_leave():
            number = source.choice(self._may_leave())
            rig.detach(number)
            self.away.discard(number)
        elif roll < 0.19 and len(numbers) < 4:
            rig.attach(self.geometry)
        elif there := [number for number in numbers if number not in self.away]:
            rig.turn(source.choice(there), source.choice(self.turns_s))
            self._check_due()

    def _may_leave(self) -> list[int]:
        """Return the executors without which each request still has one that can hold it."""
        engines = self.rig.engines
        large = [one for one in engines if engines[one].geometry == self.geometry]
        if len(engines) == 1:
            return []
        return list(engines) if len(large) > 1 else [one for one in engines if one not in large]

    def _submit(self) -> None:
        source, core = self.source, self.rig.core
        tail = [source.randrange(50) for _ in range(source.randint(1, 9))]
        prompt = np.concatenate([SHARED[: source.choice([0, 4, 8, 16])], np.array(tail, np.int32)])
        room = core._fleet.largest.limits.longest - len(prompt)
        self.rig.submit(
            prompt=prompt,
            max_tokens=min(source.randint(1, 24), room),
            num_choices=source.choice([1, 1, 1, 2, 3, 6]),
            priority=source.randint(-1, 1),
        )

    def _check_due(self) -> None:
        """Check that the loop is woken neither for what has come nor later than a wait may end."""
        self.rig.core.expire(self.rig.now)
        due_s = self.rig.core.next_deadline_s
        assert due_s is None or self.rig.now < due_s <= self.rig.now + MAX_AFFINITY_S


class TestWalks:
    @pytest.mark.slow
    @pytest.mark.parametrize("routing", list(Routing))
    @pytest.mark.parametrize("seed", range(6))
    def test_any_mix_gives_each_request_the_outputs_it_has_alone(self, routing, seed):
        """
        Executors are lost, come back, join and leave; results are one, two or four steps late. The
        state is consistent after each move, and no request, route or block is left over.
        """
        Walk(routing, seed).run(400)

    @pytest.mark.parametrize("routing", list(Routing))
    def test_a_short_mix(self, routing):
        """The same in brief."""
        Walk(routing, 100).run(120)


class TestPrecedents:
    @pytest.mark.slow
    def test_what_another_plan_found_is_what_this_one_would_find(self, monkeypatch):
        """
        Plans of one moment take over which executor is the cheapest for a waiting request, and each
        would find the same by looking at all executors itself.
        """
        reused = 0
        taken_over = routing_module._Left._cheapest_as_found

        def compared(left, request):
            nonlocal reused
            position = left._num_left.total()
            found = left._cell.router.precedents.find(position, request.number)
            reused += bool(found) and left._follows
            answer = taken_over(left, request)
            left._vacancies.clear()
            assert answer == left._cheapest(request)
            return answer

        monkeypatch.setattr(routing_module._Left, "_cheapest_as_found", compared)
        for seed in range(200, 208):
            walk = Walk(Routing.LOAD_BALANCED, seed, turns_s=(*[0.0] * 30, 0.02))
            for _ in range(3):
                walk.rig.attach(walk.geometry)
            walk.run(300)
        assert reused > 20


class TestWaiting:
    @pytest.mark.parametrize("routing", list(Routing))
    @pytest.mark.parametrize("num_executors", [2, 3])
    def test_no_request_starves_whatever_comes_later(self, routing, num_executors):
        """
        A request of the worst priority whose executor is always full of others with its prefix is
        admitted once it is aged and, on some executor that can hold it, each request that came
        before it or ran there has ended: here each takes at most 10 + 8 steps of its executor.
        """
        ageing_s = 0.02
        options = CoreOptions(routing=routing, prefix_caching_routing_alpha=1.0, ageing_s=ageing_s)
        rig = FleetRig(num_executors, options=options)
        numbers = list(rig.engines)

        def flood() -> None:
            while len(rig.core.waiting_handles()) < 12:
                tail = np.array([rig.num_handles % 50], np.int32)
                rig.submit(prompt=np.append(SHARED, tail), max_tokens=8, priority=-3)

        flood()
        for at in range(30):
            rig.turn(numbers[at % num_executors], TURN_S)
            flood()
        num_before = rig.core.num_requests
        victim, began_s = rig.submit(prompt=SHARED, max_tokens=8, priority=3), rig.now
        turn_s = 2 * TURN_S * num_executors  # A step takes one turn to plan and one to apply.
        bound_s = AGED_AFTER * ageing_s + num_before * 18 * turn_s
        at = 0
        while victim in rig.core.waiting_handles():
            rig.turn(numbers[at % num_executors], TURN_S)
            flood()
            at += 1
            assert rig.now - began_s <= bound_s, "a request starves"
        assert rig.now - began_s >= AGED_AFTER * ageing_s, "it was admitted for another reason"

    @pytest.mark.parametrize("routing", list(Routing))
    def test_no_executor_idles_beside_a_queue(self, routing):
        """
        An executor with room and nothing to do admits a waiting request after
        `MAX_AFFINITY_S` at the latest, though all prefer another one, which never plans.
        """
        options = CoreOptions(routing=routing, prefix_caching_routing_alpha=1.0)
        rig = FleetRig(2, options=options)
        rig.submit(prompt=SHARED, max_tokens=2)
        while rig.core.has_pending_work():
            rig.turn(0)
        began_s = rig.now
        for tail in range(40):
            rig.submit(prompt=np.append(SHARED, [tail]).astype(np.int32), max_tokens=4)
        while not rig.engines[1].num_admitted:
            rig.turn(1, TURN_S)
        assert rig.now - began_s <= MAX_AFFINITY_S + 2 * TURN_S
        rig.run()

        rig.check_outputs()
