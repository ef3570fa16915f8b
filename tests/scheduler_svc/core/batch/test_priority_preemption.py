"""Priority preemption: which request gives way, how often, and that no two take turns at a slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import RequestState
from tests.scheduler_svc.core.harness import Rig, queue_position, small_config


def rig_of(num_rows: int = 1, ageing_s: float = 1000.0, delay: int = 1, **changes) -> Rig:
    options = CoreOptions(
        priority_preemption=True, ageing_s=ageing_s, schedule_conservativeness=0.0
    )
    config = small_config(**{"max_batch_size": num_rows, "max_num_blocks": 64} | changes)
    return Rig(config, options=options, delay=delay)


def running(rig: Rig) -> set[int]:
    computing = {RequestState.PREFILL, RequestState.DECODE}
    return {row.handle for row in rig.core.list_requests() if row.state in computing}


class TestGivingWay:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_a_better_priority_takes_the_slot(self, delay):
        """
        A request of better priority gets the slot of a worse one when all are taken, as soon as the
        results under way are back, and both produce what they would have alone.
        """
        rig = rig_of(delay=delay)
        worse = rig.submit(max_tokens=30, priority=1)
        for _ in range(5):
            rig.step()
        better = rig.submit(max_tokens=5)
        for _ in range(delay + 1):
            rig.step()
        assert {better} == running(rig)
        rig.run()
        assert rig.ended[better].total_s < rig.ended[worse].total_s
        assert (0, 1) == tuple(rig.ended[one].num_preemptions for one in (better, worse))
        assert all(rig.expected(handle) == rig.outputs[handle] for handle in (worse, better))

    def test_an_arrival_is_looked_at_though_another_found_no_room(self):
        """
        A request that found no memory keeps those behind it waiting, but none of better priority that arrives.
        """
        rig = rig_of(num_rows=3, max_num_blocks=10)
        rig.submit(prompt_len=20, max_tokens=4, priority=1)
        for _ in range(2):
            rig.step()
        large = rig.submit(prompt_len=24, max_tokens=4, priority=1)
        rig.step()
        assert rig.core._replica.gate.is_full
        better = rig.submit(prompt_len=3, max_tokens=1)
        rig.step()
        assert better in rig.ended
        rig.run()
        assert rig.expected(large) == rig.outputs[large]

    def test_equal_priority_waits(self):
        """
        A request of the same priority never takes a slot, however long it waits.
        """
        rig = rig_of(ageing_s=1.0)
        rig.submit(max_tokens=40)
        rig.step()
        late = rig.submit(max_tokens=1)
        rig.run()
        assert 0 == rig.ended[0].num_preemptions
        assert rig.ended[0].total_s < rig.ended[late].total_s + 1.0

    def test_the_worst_goes_first_and_of_equals_the_latest(self):
        """
        The running request of the worst priority gives way, among equals the one that arrived last.
        """
        rig = rig_of(num_rows=4)
        for priority in (1, 3, 3, 2):
            rig.submit(max_tokens=40, priority=priority)
        rig.step()
        for expected in ({0, 1, 3}, {0, 3}, {0}):
            better = rig.submit(max_tokens=40)
            rig.step()
            rig.step()
            assert expected == running(rig) & {0, 1, 2, 3}
            assert better in running(rig)

    def test_it_is_off_by_default(self):
        """
        Priority only orders the queue unless priority preemption is asked for.
        """
        rig = Rig(small_config(max_batch_size=1))
        rig.submit(max_tokens=20, priority=9)
        rig.step()
        rig.submit(max_tokens=2)
        rig.run()
        assert 0 == rig.core.stats().preemptions

    def test_blocks_are_taken_too(self):
        """
        Requests of worse priority give way where slots are free but blocks are not, until a better
        one fits.
        """
        rig = rig_of(num_rows=4, max_num_blocks=12)
        for _ in range(3):
            rig.submit(prompt_len=14, max_tokens=2, priority=5)
        for _ in range(3):
            rig.step()
        better = rig.submit(prompt_len=28, max_tokens=2)
        rig.step()
        rig.step()
        assert better in running(rig)
        rig.run()
        assert all(rig.expected(handle) == rig.outputs[handle] for handle in range(4))

    def test_nobody_gives_way_in_vain(self):
        """
        A request that would lack blocks even without all worse ones takes no slot.
        """
        rig = rig_of(num_rows=3, max_num_blocks=10)
        rig.submit(prompt_len=20, max_tokens=10)
        rig.submit(prompt_len=4, max_tokens=12, priority=5)
        for _ in range(4):
            rig.step()
        rig.submit(prompt_len=24, max_tokens=2)
        for _ in range(3):
            rig.step()
        assert {0, 1} == running(rig)
        rig.run()

    def test_several_advance_at_once(self):
        """
        One plan makes way for as many better requests as there are worse ones.
        """
        rig = rig_of(num_rows=3)
        for _ in range(3):
            rig.submit(max_tokens=40, priority=1)
        rig.step()
        better = {rig.submit(max_tokens=40, prompt_len=2) for _ in range(4)}
        rig.step()
        rig.step()
        assert 3 == len(running(rig) & better)
        assert 3 == rig.core.stats().preemptions


class TestTakingTurns:
    def test_a_request_gives_way_once(self):
        """
        A preempted request that has its slot back keeps it, whatever arrives.
        """
        rig = rig_of()
        rig.submit(max_tokens=30, priority=1)
        rig.step()
        rig.submit(max_tokens=2)
        while queue_position(rig.core, 0) is None:
            rig.step()
        while queue_position(rig.core, 0) is not None:
            rig.step()
        rig.submit(max_tokens=2)
        rig.run()
        assert 1 == rig.ended[0].num_preemptions

    def test_an_aged_request_is_not_taken_its_slot(self):
        """
        A request admitted for having waited long runs to its end.
        """
        rig = rig_of(ageing_s=1.0)
        rig.submit(max_tokens=20)
        rig.step()
        waits = rig.submit(max_tokens=20, priority=5)
        while queue_position(rig.core, waits) is not None:
            rig.step()
        for _ in range(5):
            rig.submit(max_tokens=2)
            rig.step()
        rig.run()
        assert (0, 0) == tuple(rig.ended[handle].num_preemptions for handle in (0, waits))

    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 12), st.integers(0, 3)), max_size=25),
        st.integers(1, 3),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([0.5, 3.0, 100.0]),
    )
    def test_any_arrivals_end_with_their_tokens(self, arrivals, num_rows, delay, ageing_s):
        """
        Each request gives way at most once, whatever arrives, and ends with the tokens it would
        have produced alone.
        """
        rig = rig_of(num_rows, ageing_s, delay)
        for priority, max_tokens, num_steps in arrivals:
            rig.submit(max_tokens=max_tokens, priority=priority)
            for _ in range(num_steps):
                rig.step()
        rig.run()
        assert rig.core.stats().preemptions <= len(arrivals)
        for handle in rig.submitted:
            assert rig.expected(handle) == rig.outputs[handle]
            assert rig.ended[handle].num_preemptions <= 1
