"""Executors that are lost for a while, leave for good or join."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, OnPressure
from tandem.errors import InternalError, NeverFits, TotalTooLong
from tests.scheduler_svc.core.harness import geometry_of, small_config
from tests.scheduler_svc.core.replicas.fleet_rig import FleetRig

SHARED = np.arange(16, dtype=np.int32) % 50
"""Prompt of four blocks that requests begin with."""


def small_and_large() -> FleetRig:
    """Return a rig with a small executor, 0, and a large one, 1."""
    config = small_config()
    return FleetRig([replace(geometry_of(config), num_blocks=4), geometry_of(config)])


class TestAway:
    def test_no_request_is_left_to_an_executor_that_is_away(self):
        """Its prefix cache is gone with it, so another admits at once."""
        rig = FleetRig(2)
        rig.submit(prompt=SHARED)
        while rig.core.has_pending_work():
            rig.turn(0)
        rig.engines[0].port.executor_lost(rig.now)
        rig.submit(prompt=np.append(SHARED, [4]).astype(np.int32))
        rig.turn(1)

        assert 1 == rig.engines[1].num_admitted
        assert rig.engines[0].port._replica.vacancy() is None

    def test_requests_are_checked_against_executors_that_are_there(self):
        """One that only the executor that is away could hold is refused until it is back."""
        rig = small_and_large()
        rig.engines[1].port.executor_lost(rig.now)
        with pytest.raises(NeverFits, match="there are 4"):
            rig.submit(prompt_len=30, max_tokens=20)
        rig.engines[1].start_over()
        rig.turn(1)
        rig.submit(prompt_len=30, max_tokens=20)
        rig.run()

        rig.check_outputs()

    def test_an_accepted_request_waits_for_the_one_executor_that_can_hold_it(self):
        """Neither its loss nor the leaving of a third one fails the request."""
        rig = small_and_large()
        rig.attach(replace(geometry_of(rig.config), num_blocks=4))
        long = rig.submit(prompt_len=30, max_tokens=20)
        rig.turn(1)
        rig.lose(1)
        rig.detach(2)
        for _ in range(30):
            rig.turn(0)
        assert long not in rig.ended
        rig.run()

        rig.check_outputs()

    def test_pressure_is_that_of_executors_that_are_there(self):
        """An empty executor that is away does not make room for a request that arrives."""
        config = small_config(memory_threshold=0.5)
        rig = FleetRig(2, config=config, options=CoreOptions(on_pressure=OnPressure.REFUSE))
        rig.submit(prompt_len=56, max_tokens=4)
        for _ in range(12):
            rig.turn(0)
        assert not rig.core._fleet.under_pressure()
        rig.engines[1].port.executor_lost(rig.now)
        assert rig.core._fleet.under_pressure() is rig.core._fleet[0].under_pressure()

    def test_while_all_are_away_all_count(self):
        """Requests are accepted as if the executors were there, and wait."""
        rig = small_and_large()
        for engine in rig.engines.values():
            engine.port.executor_lost(rig.now)
            engine.start_over()
        rig.submit(prompt_len=30, max_tokens=20)
        with pytest.raises(TotalTooLong):
            rig.submit(prompt_len=60, max_tokens=20)
        rig.run()

        rig.check_outputs()


class TestDetach:
    def test_the_first_executor_may_leave_like_any_other(self):
        """Its port does nothing any more; what the cell does goes on, and its request too."""
        rig = FleetRig(2)
        running = rig.submit(max_tokens=12)
        for _ in range(4):
            rig.turn(0)
        rig.detach(0)
        core = rig.core
        for call in (
            lambda: core.schedule(rig.now),
            lambda: core.limits,
            lambda: core.executor_lost(rig.now),
            lambda: core.lookahead(0.01),
            core.resume,
            core.take_command,
            core.slot_columns,
        ):
            with pytest.raises(InternalError, match="executor 0 is asked for and was removed"):
                call()
        waiting = rig.submit()
        assert [running, waiting] == core.waiting_handles()
        assert 2 == core.stats().waiting_requests
        assert 2 == len(core.list_requests())
        rig.run()

        rig.check_outputs()

    @pytest.mark.parametrize("number", [0, 1])
    def test_the_last_executor_may_not_leave(self, number):
        """Whichever it is; the requests go on there."""
        rig = FleetRig(2)
        rig.submit()
        rig.detach(1 - number)
        with pytest.raises(InternalError, match="the last executor cannot be removed"):
            rig.detach(number)
        rig.run()

        rig.check_outputs()

    def test_another_joins_after_the_first_has_left(self):
        """Numbers go on, and blocks must have the size that the executors have by now."""
        rig = FleetRig(2)
        rig.detach(0)
        rig.attach()
        rig.submit()
        rig.run()

        assert [1, 2] == list(rig.engines)
        rig.check_outputs()

    def test_what_was_left_to_one_that_has_left_is_admitted_at_once(self):
        """The last executor leaves nothing to others, and its loop is not woken for that."""
        rig = FleetRig(2)
        rig.submit(prompt=SHARED)
        while rig.core.has_pending_work():
            rig.turn(0)
        rig.submit(prompt=np.append(SHARED, [4]).astype(np.int32))
        rig.turn(1, 0.001)
        assert rig.core.next_deadline_s is not None
        rig.detach(0)
        assert rig.core.next_deadline_s is None
        rig.turn(1, 0.001)
        assert 1 == rig.engines[1].num_admitted
        rig.run()

        rig.check_outputs()
