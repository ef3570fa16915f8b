"""Whether an executor is alive and gets on, from what was heard of it and when."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.executor_client.watch import (
    LEARN_EVERY,
    LONGEST_GAP_S,
    STALLED_AFTER_S,
    ExecutorWatch,
)
from tandem.link.batch import Batch, Resume
from tandem.link.session import Heartbeat
from tandem.link.step_cost import ALWAYS_ALLOWED_S, COMMAND_ALLOWED_S, SLACK


def batch(num_tokens: int = 1) -> Batch:
    return Batch(
        row_slot=np.zeros(1, np.int32),
        row_start=np.zeros(1, np.int32),
        row_num_tokens=np.array([num_tokens], np.int32),
    )


def beat(running: int = 0, elapsed_s: float = 0.0, completed: int = 0) -> Heartbeat:
    return Heartbeat(
        running_step_id=running,
        elapsed_ms=int(elapsed_s * 1000),
        last_completed_step_id=completed,
    )


def look_for(watch: ExecutorWatch, seconds: float, in_flight=None, every_s: float = 0.5) -> None:
    """Look every now and then for so long."""
    for _ in range(round(seconds / every_s)):
        watch.now += every_s
        watch.look(in_flight or {}, watch.now)


class Watch(ExecutorWatch):
    """One with a clock of its own."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.now = 100.0


@pytest.fixture
def watch() -> Watch:
    return Watch()


class TestSilence:
    def test_grows_until_something_is_heard(self, watch):
        """Silence is the time since the last message, of whatever kind."""
        look_for(watch, 3.0)
        assert (3.0, 3.0, 3.0) == (
            watch.silent_s,
            watch.session_silent_s,
            watch.stream_silent_s,
        )
        watch.heard()
        look_for(watch, 0.5)
        assert 0.5 == watch.silent_s == watch.session_silent_s == watch.stream_silent_s

    def test_own_absence_hardly_counts(self, watch):
        """A minute in which nobody looked counts as one second."""
        watch.now += 60.0
        watch.look({}, watch.now)
        assert LONGEST_GAP_S == watch.silent_s

    def test_clock_that_stands_still_or_goes_back_adds_nothing(self, watch):
        """Two looks at one moment, or at an earlier one, are no silence."""
        watch.look({}, 100.0)
        watch.look({}, 40.0)
        assert 0.0 == watch.silent_s

    def test_new_stream_is_given_time(self, watch):
        """A stream's silence begins with it; the executor's goes on."""
        look_for(watch, 4.0)
        watch.begin_stream()
        look_for(watch, 1.0)
        assert (1.0, 5.0) == (watch.stream_silent_s, watch.session_silent_s)

    def test_new_session_is_no_message(self, watch):
        """Opening a session gives it time, and does not make the executor heard."""
        look_for(watch, 4.0)
        watch.begin_session()
        look_for(watch, 1.0)
        assert (1.0, 5.0) == (watch.session_silent_s, watch.silent_s)
        assert not watch.was_heard


class TestLateness:
    def test_counts_from_the_steps_start(self, watch):
        """A step is late by what its age, as the executor says, is over what it may take."""
        in_flight = {7: batch()}
        watch.beat(beat(7, ALWAYS_ALLOWED_S), watch.now)
        watch.look(in_flight, watch.now)
        assert 0.0 == watch.stuck_s
        watch.beat(beat(7, ALWAYS_ALLOWED_S + 2.5), watch.now)
        watch.look(in_flight, watch.now)
        assert 2.5 == watch.stuck_s

    def test_step_whose_result_came_is_not_late(self, watch):
        """What the last heartbeat said of a step is forgotten once its result is here."""
        watch.beat(beat(7, 99.0), watch.now)
        watch.look({8: batch()}, watch.now)
        assert 0.0 == watch.stuck_s

    def test_learns_from_long_steps_and_some_of_the_others(self, watch):
        """Twenty times what steps like it took is late; quick steps teach now and then."""
        for step_id in range(1, LEARN_EVERY):
            watch.step_done(step_id, batch(), 0.04)
        assert 0.0 == watch._cost._seconds
        watch.step_done(LEARN_EVERY, batch(), 0.04)
        assert 0.04 == watch._cost._seconds
        for step_id in range(100, 300):
            watch.step_done(step_id, batch(1000), 2.0)
        watch.beat(beat(7, SLACK * 2.0), watch.now)
        watch.look({7: batch(1000)}, watch.now)
        assert 0.0 == watch.stuck_s
        watch.beat(beat(7, SLACK * 4.5), watch.now)
        watch.look({7: batch(1000)}, watch.now)
        assert watch.stuck_s > 0.0

    def test_command_has_minutes_and_teaches_nothing(self, watch):
        """Resuming moves memory: it is late late, and says nothing about steps."""
        watch.step_done(16, Resume(), 30.0)
        assert 0.0 == watch.usual_step_s
        watch.beat(beat(7, COMMAND_ALLOWED_S - 1), watch.now)
        watch.look({7: Resume()}, watch.now)
        assert 0.0 == watch.stuck_s

    def test_usual_step_follows_slowly(self, watch):
        """The first step sets what is usual, later ones move it by a tenth."""
        watch.step_done(1, batch(), 0.01)
        assert 0.01 == pytest.approx(watch.usual_step_s)
        watch.step_done(2, batch(), 0.11)
        assert 0.02 == pytest.approx(watch.usual_step_s)


class TestStall:
    def stalls(
        self, watch: Watch, heartbeat: Heartbeat, seconds: float, last_applied=4, num_bytes=1000
    ):
        """Whether so many seconds of this heartbeat count as a stall."""
        found = False
        for _ in range(round(seconds / 0.1)):
            watch.now += 0.1
            watch.beat(heartbeat, watch.now)
            found = found or watch.is_stalled({5: batch()}, num_bytes, last_applied, watch.now)
        return found

    def test_idle_executor_while_a_step_waits(self, watch):
        """Nothing runs, for over half a second, though a small step was sent."""
        assert not self.stalls(watch, beat(0, completed=4), STALLED_AFTER_S)
        assert self.stalls(watch, beat(0, completed=4), 0.4)

    def test_result_that_never_came(self, watch):
        """More was completed than results came, though the next step runs."""
        assert self.stalls(watch, beat(6, 0.1, completed=5), 1.0)

    def test_running_step_is_no_stall(self, watch):
        """A step that computes will have its result."""
        assert not self.stalls(watch, beat(5, 3.0, completed=4), 5.0)

    def test_any_result_begins_anew(self, watch):
        """While results come nothing is lost."""
        assert not self.stalls(watch, beat(0, completed=4), 0.4)
        watch.step_done(4, batch(), 0.01)
        assert not self.stalls(watch, beat(0, completed=4), 0.4)

    def test_old_heartbeat_proves_nothing(self, watch):
        """One idle heartbeat, however long ago, may be older than the step it does not know."""
        watch.beat(beat(0, completed=4), watch.now)
        for _ in range(20):
            watch.now += 0.5
            assert not watch.is_stalled({5: batch()}, 1000, 4, watch.now)

    def test_new_stream_begins_anew(self, watch):
        """After another stream was opened the executor has its time again."""
        assert not self.stalls(watch, beat(0, completed=4), 0.4)
        watch.begin_stream()
        assert not self.stalls(watch, beat(0, completed=4), 0.4)

    def test_large_step_has_time_for_its_bytes(self, watch):
        """A large step arrives in the end: each stream in vain gives its bytes twice as long."""
        for transfer_s in (2.0, 4.0, 8.0):
            watch.begin_stream()
            patience_s = STALLED_AFTER_S + transfer_s
            assert not self.stalls(watch, beat(0, completed=4), patience_s, num_bytes=2_000_000)
            assert self.stalls(watch, beat(0, completed=4), 0.4, num_bytes=2_000_000)
        watch.step_done(5, batch(), 0.01)
        watch.begin_stream()
        assert self.stalls(watch, beat(0, completed=4), 3.0, num_bytes=2_000_000)

    def test_small_step_never_waits_longer(self, watch):
        """However often a small message was lost, its loss is noticed as soon as the first time."""
        for _ in range(10):
            watch.begin_stream()
            assert self.stalls(watch, beat(0, completed=4), 1.0)
