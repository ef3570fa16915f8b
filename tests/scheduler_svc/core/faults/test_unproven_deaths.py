"""Executors that fall silent: their steps are blamed when they are seen to have died."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import PoisonRequest
from tests.scheduler_svc.core.harness import Rig, small_config

WIDE = small_config(max_num_blocks=128, max_batch_size=16, max_total_tokens=64)
LONG = small_config(max_num_blocks=128, max_total_tokens=64, max_model_len=256)
FAULTS = st.lists(
    st.tuples(
        st.integers(0, 9),  # steps before the fault
        st.integers(0, 3),  # the step that ran when last heard
        st.sampled_from(["here", "there"]),  # the executor that falls silent
        st.sampled_from(["here", "there", "nobody"]),  # the executor seen alive then
    ),
    max_size=12,
)


def rig_with(count: int, max_tokens: int = 24) -> Rig:
    """Return a rig with `count` requests that all run at once."""
    rig = Rig(WIDE, options=CoreOptions(schedule_conservativeness=0.0), checked=False)
    for _ in range(count):
        rig.submit(prompt_len=6, max_tokens=max_tokens)
    return rig


def lose_sight(rig: Rig, boot_id: str = "a") -> None:
    """Let an executor fall silent in the step that was just sent."""
    rig.plan()
    rig.deaths.note(rig.core, 0, rig.owners)
    rig.lose_executor(died_in=0, may_live=boot_id)


class TestFaultsOfTheNetwork:
    @settings(deadline=None, max_examples=25)
    @given(count=st.integers(1, 4), faults=FAULTS)
    def test_never_accuse_anybody(self, count, faults):
        """
        No request is suspected or fails, and all have every token, however often executors that
        live are not heard and in whatever order they are found again.
        """
        rig = rig_with(count)
        for num_steps, died_in, silent, seen in faults:
            for _ in range(num_steps):
                if rig.core.has_pending_work():
                    rig.step()
            for _ in range(died_in + 1):
                rig.plan()
            rig.lose_executor(died_in, may_live=silent)
            rig.core.executor_seen(seen, rig.now, died=False)
            assert not rig.core._cell.suspects.has_marks
        rig.run()
        assert ({}, 0) == (rig.failed, rig.core.stats().executor_deaths)
        assert all(rig.expected(handle) == rig.outputs[handle] for handle in range(count))


class TestProof:
    def test_two_deaths_seen_later_make_poison(self):
        """
        A request that kills executors alone, each seen dead only after the work had moved, fails.
        """
        rig = rig_with(1)
        lose_sight(rig, "a")
        lose_sight(rig, "b")
        rig.core.executor_seen("a", rig.now, died=True)
        assert not rig.failed
        rig.core.executor_seen("b", rig.now, died=True)
        rig.collect()
        assert isinstance(rig.failed[0].error, PoisonRequest)

    @pytest.mark.parametrize("num_outputs", [0, 30])
    def test_tokens_known_before_are_no_sign_of_getting_on(self, num_outputs):
        """
        A request is blamed when the first of its several chunks kills, though it has more tokens
        than those it was to get past.
        """
        rig = Rig(LONG, checked=False)
        rig.submit(prompt_len=100, max_tokens=60)
        while len(rig.outputs[0]) < num_outputs:
            rig.step()
        rig.lose_executor()
        for boot_id in ("a", "b"):
            lose_sight(rig, boot_id)
            rig.core.executor_seen(boot_id, rig.now, died=True)
        rig.collect()
        assert isinstance(rig.failed[0].error, PoisonRequest)

    def test_first_new_token_is_a_sign_where_all_tokens_are_computed_again(self):
        """
        A request with a first chunk that did not kill elsewhere is not blamed for a death in it.
        """
        rig = Rig(LONG, checked=False)
        rig.submit(prompt_len=100, max_tokens=60)
        lose_sight(rig)
        while not rig.outputs[0]:
            rig.step()
        rig.lose_executor()
        rig.core.executor_seen("a", rig.now, died=True)
        assert not rig.core._cell.suspects.has_marks
        rig.run()

    def test_one_death_counts_once(self):
        """
        A death counts once, however often its executor is seen to have died.
        """
        rig = rig_with(2)
        lose_sight(rig)
        for _ in range(3):
            rig.core.executor_seen("a", rig.now, died=True)
        assert [1, 1] == [mark.deaths for mark in rig.core._cell.suspects.marks()]
        rig.run()

    def test_who_got_on_elsewhere_is_not_blamed(self):
        """
        Requests that have produced eight tokens more by the time a death is seen are not blamed for
        it.
        """
        rig = rig_with(2)
        lose_sight(rig)
        for _ in range(10):
            rig.step()
        rig.lose_executor()
        rig.core.executor_seen("a", rig.now, died=True)
        assert not rig.core._cell.suspects.has_marks
        assert 1 == rig.core.stats().executor_deaths
        rig.run()

    def test_who_ended_since_may_be_to_blame_as_well(self):
        """
        The request that is left of a step of two did not die alone, though the other has ended
        since.
        """
        rig = rig_with(2)
        for boot_id in ("a", "b"):
            lose_sight(rig, boot_id)
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        for boot_id in ("a", "b"):
            rig.core.executor_seen(boot_id, rig.now, died=True)
        (mark,) = rig.core._cell.suspects.marks()
        assert (1, 2, 0) == (mark.request.number, mark.deaths, mark.deaths_alone)
        rig.run()

    def test_memory_is_bounded_by_the_executors(self):
        """
        Only the latest silence of each boot is kept, and none of those that were seen again.
        """
        rig = rig_with(2)
        for _ in range(5):
            lose_sight(rig)
        assert 1 == len(rig.core._cell.suspects._unproven_deaths)
        rig.core.executor_seen("a", rig.now, died=False)
        assert {} == rig.core._cell.suspects._unproven_deaths
        rig.run()
