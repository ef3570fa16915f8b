"""Several executors: one queue, requests bound when they are admitted, and losses."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from tandem.errors import InternalError, InvalidConfig, NeverFits
from tests.scheduler_svc.core.harness import geometry_of, small_config
from tests.scheduler_svc.core.replicas.fleet_rig import FleetRig

SHARED = np.arange(16, dtype=np.int32) % 50
"""Prompt of four blocks that many requests begin with."""


def options_of(source: random.Random) -> CoreOptions:
    """Draw options."""
    return CoreOptions(
        schedule_policy=source.choice(["fcfs", "lpm", "dfs-weight", "lof"]),
        preemption_mode=source.choice(list(PreemptionMode)),
        priority_preemption=source.random() < 0.3,
    )


class TestReplicas:
    def test_requests_of_an_idle_cell_are_spread_over_its_executors(self):
        """No executor takes all that waits while another is idle."""
        rig = FleetRig(4)
        for _ in range(8):
            rig.submit(prompt_len=8)
        rig.run()

        rig.check_outputs()
        assert 1 <= min(engine.num_admitted for engine in rig.engines.values())

    def test_a_request_goes_where_its_prefix_is_cached(self):
        """Of two idle executors, the one that computed the prompt's beginning is asked first."""
        rig = FleetRig(2)
        rig.submit(prompt=SHARED)
        rig.run()
        first = [engine.num_admitted for engine in rig.engines.values()]
        rig.submit(prompt=np.append(SHARED, [1, 2, 3]).astype(np.int32))
        rig.run()

        rig.check_outputs()
        assert [2 * count for count in first] == [e.num_admitted for e in rig.engines.values()]
        assert 16 == rig.core.stats().prefix_cache_hit_tokens

    def test_a_request_left_to_an_executor_that_never_plans_is_taken_by_another(self):
        """A preference is worth a short wait and no more."""
        rig = FleetRig(2)
        rig.submit(prompt=SHARED)
        while rig.core.has_pending_work():
            rig.turn(0)
        rig.submit(prompt=np.append(SHARED, [4]).astype(np.int32))
        rig.turn(1)
        assert not rig.engines[1].num_admitted
        for _ in range(40):
            rig.turn(1)

        rig.check_outputs()
        assert 1 == rig.engines[1].num_admitted

    def test_a_request_too_long_for_the_small_executor_runs_on_the_large_one(self):
        """Short requests behind it go on at the small one, even when the long one is aged."""
        config = small_config()
        small = replace(geometry_of(config), num_blocks=4)
        rig = FleetRig([small, geometry_of(config)], options=CoreOptions(ageing_s=0.01))
        long = rig.submit(prompt_len=30, max_tokens=20)
        rig.now += 5.0
        short = rig.submit(prompt_len=4, max_tokens=4)
        for _ in range(30):
            rig.turn(0)
        assert short in rig.ended
        assert long not in rig.ended
        rig.run()

        rig.check_outputs()

    def test_an_executor_of_another_block_size_is_refused_alone(self):
        """The others go on."""
        rig = FleetRig(2)
        handle = rig.submit()
        other = small_config(block_size=8)
        with pytest.raises(InvalidConfig, match="block_size 8 and the others have 4"):
            rig.core.attach(other, geometry_of(other))
        rig.run()

        assert rig.expected(handle) == rig.outputs[handle]

    def test_a_request_that_only_a_removed_executor_could_hold_fails(self):
        """Others go on, and a port of the removed one does nothing any more."""
        config = small_config()
        small = replace(geometry_of(config), num_blocks=4)
        rig = FleetRig([small, geometry_of(config)])
        long, short = rig.submit(prompt_len=30, max_tokens=20), rig.submit(prompt_len=4)
        rig.turn(1)
        port = rig.engines[1].port
        rig.detach(1)
        assert isinstance(rig.failed[long].error, NeverFits)
        with pytest.raises(InternalError, match="executor 1 is asked for and was removed"):
            port.schedule(rig.now)
        rig.run()

        assert rig.expected(short) == rig.outputs[short]

    def test_a_number_is_not_used_twice(self):
        """Versions and orders kept for an executor that left are never taken for those of another."""
        rig = FleetRig(2)
        rig.detach(1)
        rig.attach()

        assert [0, 2] == list(rig.engines)

    def test_what_ran_on_a_lost_executor_goes_on_elsewhere(self):
        """Requests keep their outputs, and each token comes once."""
        rig = FleetRig(3)
        for _ in range(9):
            rig.submit(prompt_len=6, max_tokens=20)
        for number in [0, 1, 2] * 8:
            rig.turn(number)
        rig.detach(1)
        rig.lose(2, died_in=0)
        rig.run()

        rig.check_outputs()
        assert rig.core.stats().recomputed_tokens > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(12))
    def test_any_mix_of_work_losses_and_paces_gives_the_same_outputs(self, seed):
        """
        Requests with shared prefixes and choices, aborts, losses, executors that come and go, and
        memory that is short: all end with what they produce alone, and no block is lost.
        """
        source = random.Random(seed)
        config = small_config(max_num_blocks=source.choice([17, 24, 32]))
        num_host = source.choice([0, 12])
        sizes = [geometry_of(config, num_host_blocks=num_host)] * source.randint(1, 4)
        rig = FleetRig(
            sizes, config=config, delay=source.choice([1, 2, 4]), options=options_of(source)
        )
        for _ in range(300):
            roll = source.random()
            if roll < 0.12 and rig.core.num_requests < 40:
                tail = np.array(
                    [source.randrange(50) for _ in range(source.randint(1, 9))], np.int32
                )
                shared = SHARED[: source.choice([0, 4, 8, 16])]
                rig.submit(
                    prompt=np.concatenate([shared, tail]),
                    max_tokens=source.randint(1, 20),
                    num_choices=source.choice([1, 1, 1, 2, 3]),
                    priority=source.randint(-1, 1),
                )
            elif roll < 0.14 and (live := set(rig.submitted) - set(rig.ended)):
                rig.end(source.choice(sorted(live)))
            elif roll < 0.15:
                rig.lose(source.choice(list(rig.engines)))
            elif roll < 0.16 and len(rig.engines) > 2:
                rig.detach(max(rig.engines))
            elif roll < 0.17 and len(rig.engines) < 4:
                rig.attach()
            else:
                rig.turn(source.choice(list(rig.engines)))
        rig.run(source)

        rig.check_outputs()
