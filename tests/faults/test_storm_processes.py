"""Processes are killed, stopped, told to stop and replaced while 64 streams run."""

from __future__ import annotations

import pytest

from tests.faults.conftest import TIMES
from tests.faults.logs import count, events
from tests.faults.schedule import Kind

QUICK = ("--lost-after-s=2",)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestProcessStorms:
    def test_one_executor(self, storm):
        """
        A single executor that is killed, told to stop, fails a step or is replaced by other weights
        for a while costs its streams a pause and nothing else, even if they are preempted and
        swapped for lack of blocks.
        """
        kinds = [
            Kind.EXECUTOR_KILLED,
            Kind.EXECUTOR_DRAINED,
            Kind.STEP_RAISES,
            Kind.OTHER_WEIGHTS,
        ]
        executor = ("--max-num-blocks=700", "--swap-space-gb=0.01")
        scheduler = (
            "--memory-threshold=1",
            "--schedule-conservativeness=0",
            "--preemption-mode=swap",
            "--window=4",
        )
        storm(
            kinds,
            until=lambda stats: stats.retractions and stats.swapped_in_blocks,
            executor=executor,
            scheduler=scheduler,
        )

    def test_another_executor(self, storm):
        """
        Streams of an executor that hangs or is paused for long go on at a second one that stands
        by.
        """
        kinds = [Kind.EXECUTOR_HUNG, Kind.STEP_HANGS]
        storm(kinds, num_executors=2, scheduler=QUICK)

    def test_short_pause(self, storm):
        """
        An executor that stops for less than lost_after_s turns readiness off and on again each
        time, and computes nothing twice.
        """
        done, lines = storm([Kind.EXECUTOR_PAUSED])
        assert 0 == lines[0].recomputed_tokens
        assert 1 == count(done.rig.logs(), "session_opened")
        assert done.rig.stats().steps == done.rig.executors[0].num_steps()
        assert TIMES <= done.readiness.num_times_off()

    def test_server(self, storm):
        """
        Clients of a scheduler or frontend that is killed, or of a scheduler told to stop, get the
        rest of their streams from the next one.
        """
        kinds = [Kind.SCHEDULER_KILLED, Kind.SCHEDULER_STOPPED, Kind.FRONTEND_KILLED]
        storm(kinds, scheduler=("--drain-grace-s=1",))

    def test_nothing_is_lost(self, storm):
        """
        A scheduler or frontend that stops for seconds goes on where it was; logs that cannot be
        written and a wall clock that jumps by years disturb no stream, and nothing is computed
        twice.
        """
        kinds = [Kind.SCHEDULER_PAUSED, Kind.FRONTEND_PAUSED, Kind.DISK_FULL, Kind.CLOCK_JUMP]
        done, lines = storm(kinds)
        assert [0] * len(kinds) == [line.recomputed_tokens for line in lines]
        log = done.rig.scheduler.log
        assert count([log], "log_lines_dropped") > 0
        assert len({str(event.get("timestamp"))[:4] for event in events(log)}) > 1
