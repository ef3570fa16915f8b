"""Signs that an executor lives and makes progress, from the messages it sent and their times."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.executor_client.watch import (
    LONGEST_GAP_S,
    STALLED_AFTER_S,
    ExecutorWatch,
)
from tandem.link.batch import Batch
from tandem.link.commands import Resume
from tandem.link.session import Heartbeat
from tandem.link.step_cost import ALWAYS_ALLOWED_S, COMMAND_ALLOWED_S, LEARN_EVERY, SLACK


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
    """Let time pass, with a look at every interval."""
    for _ in range(round(seconds / every_s)):
        watch.now += every_s
        watch.look(in_flight or {}, watch.now)


class Watch(ExecutorWatch):
    """Watch with a clock of its own."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.now = 100.0


@pytest.fixture
def watch() -> Watch:
    return Watch()


class TestSilence:
    def test_grows_until_something_is_heard(self, watch):
        """Silence is the time since the last message, of any kind."""
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
        """A minute without a look counts as one second."""
        watch.now += 60.0
        watch.look({}, watch.now)
        assert LONGEST_GAP_S == watch.silent_s

    def test_clock_that_stands_still_or_goes_back_adds_nothing(self, watch):
        """Two looks at one moment, or a second at an earlier one, add no silence."""
        watch.look({}, 100.0)
        watch.look({}, 40.0)
        assert 0.0 == watch.silent_s

    def test_new_stream_is_given_time(self, watch):
        """A new stream's silence starts at 0; the session's goes on."""
        look_for(watch, 4.0)
        watch.begin_stream()
        look_for(watch, 1.0)
        assert (1.0, 5.0) == (watch.stream_silent_s, watch.session_silent_s)

    def test_new_session_is_no_message(self, watch):
        """A new session's silence starts at 0, and does not count as a message of the executor."""
        look_for(watch, 4.0)
        watch.begin_session()
        look_for(watch, 1.0)
        assert (1.0, 5.0) == (watch.session_silent_s, watch.silent_s)
        assert not watch.was_heard


class TestLateness:
    def test_counts_from_the_steps_start(self, watch):
        """
        A step is late by the time that its age, as the executor reports it, is over what it may
        take.
        """
        in_flight = {7: batch()}
        watch.beat(beat(7, ALWAYS_ALLOWED_S), watch.now)
        watch.look(in_flight, watch.now)
        assert 0.0 == watch.stuck_s
        watch.beat(beat(7, ALWAYS_ALLOWED_S + 2.5), watch.now)
        watch.look(in_flight, watch.now)
        assert 2.5 == watch.stuck_s

    def test_step_whose_result_came_is_not_late(self, watch):
        """A heartbeat's report of a step is forgotten once the step's result has come."""
        watch.beat(beat(7, 99.0), watch.now)
        watch.look({8: batch()}, watch.now)
        assert 0.0 == watch.stuck_s

    def test_learns_from_long_steps_and_some_of_the_others(self, watch):
        """
        A step is late after twenty times what steps like it took; of quick steps only some are
        learned from.
        """
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
        """
        A command like Resume, which moves memory, may take minutes and teaches nothing about steps.
        """
        watch.step_done(16, Resume(), 30.0)
        assert 0.0 == watch.usual_step_s
        watch.beat(beat(7, COMMAND_ALLOWED_S - 1), watch.now)
        watch.look({7: Resume()}, watch.now)
        assert 0.0 == watch.stuck_s

    def test_usual_step_follows_slowly(self, watch):
        """The first step sets the usual time, and later ones move it by a tenth."""
        watch.step_done(1, batch(), 0.01)
        assert 0.01 == pytest.approx(watch.usual_step_s)
        watch.step_done(2, batch(), 0.11)
        assert 0.02 == pytest.approx(watch.usual_step_s)


class TestStall:
    def stalls(
        self, watch: Watch, heartbeat: Heartbeat, seconds: float, last_applied=4, num_bytes=1000
    ):
        """Return if so many seconds of this heartbeat count as a stall."""
        found = False
        for _ in range(round(seconds / 0.1)):
            watch.now += 0.1
            watch.beat(heartbeat, watch.now)
            found = found or watch.is_stalled({5: batch()}, num_bytes, last_applied, watch.now)
        return found

    def test_idle_executor_while_a_step_waits(self, watch):
        """
        An executor that runs nothing for over half a second after a small step was sent has
        stalled.
        """
        assert not self.stalls(watch, beat(0, completed=4), STALLED_AFTER_S)
        assert self.stalls(watch, beat(0, completed=4), 0.4)

    def test_result_that_never_came(self, watch):
        """A completed step without its result is a stall, even if the next step runs."""
        assert self.stalls(watch, beat(6, 0.1, completed=5), 1.0)

    def test_running_step_is_no_stall(self, watch):
        """A running step is no stall, since its result will come."""
        assert not self.stalls(watch, beat(5, 3.0, completed=4), 5.0)

    def test_any_result_begins_anew(self, watch):
        """A result starts the time to a stall anew."""
        assert not self.stalls(watch, beat(0, completed=4), 0.4)
        watch.step_done(4, batch(), 0.01)
        assert not self.stalls(watch, beat(0, completed=4), 0.4)

    def test_old_heartbeat_proves_nothing(self, watch):
        """A single idle heartbeat proves no stall, since it may be older than the step."""
        watch.beat(beat(0, completed=4), watch.now)
        for _ in range(20):
            watch.now += 0.5
            assert not watch.is_stalled({5: batch()}, 1000, 4, watch.now)

    def test_new_stream_begins_anew(self, watch):
        """A new stream starts the time to a stall anew."""
        assert not self.stalls(watch, beat(0, completed=4), 0.4)
        watch.begin_stream()
        assert not self.stalls(watch, beat(0, completed=4), 0.4)

    def test_large_step_has_time_for_its_bytes(self, watch):
        """A large step has time for its bytes, which doubles with each stream in vain."""
        for transfer_s in (2.0, 4.0, 8.0):
            watch.begin_stream()
            patience_s = STALLED_AFTER_S + transfer_s
            assert not self.stalls(watch, beat(0, completed=4), patience_s, num_bytes=2_000_000)
            assert self.stalls(watch, beat(0, completed=4), 0.4, num_bytes=2_000_000)
        watch.step_done(5, batch(), 0.01)
        watch.begin_stream()
        assert self.stalls(watch, beat(0, completed=4), 3.0, num_bytes=2_000_000)

    def test_small_step_never_waits_longer(self, watch):
        """The loss of a small message is noticed equally soon, however often it happens."""
        for _ in range(10):
            watch.begin_stream()
            assert self.stalls(watch, beat(0, completed=4), 1.0)
