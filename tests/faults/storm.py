"""
A storm: 64 streams against real processes while a schedule of faults is injected, and the checks
that must hold in spite of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem_client import NO_RETRY, RetryPolicy
from tests.faults.injecting.inject import inject
from tests.faults.injecting.target import Target
from tests.faults.leaks import Holding, find_leaks, holdings
from tests.faults.logs import find_problems
from tests.faults.processes.rig import Rig
from tests.faults.readiness import ReadinessWatch
from tests.faults.report import Line, Occurrence, summarize, table
from tests.faults.schedule import LINK_KINDS, SERVER_KINDS, Fault
from tests.faults.workload.reference import Reference
from tests.faults.workload.streams import Streams
from tests.waiting import wait_until

FLOW_S = 180.0
"""Longest time in seconds until every stream has tokens again."""
PATIENT = RetryPolicy(max_attempts=1000, initial_delay_s=0.1, max_delay_s=0.5)
"""Retries for clients of a server that dies: they ask for the rest until they get it."""


class StormFailed(AssertionError):
    """A storm broke a promise; the text has the schedule, the table and the ends of all logs."""


@dataclass(slots=True, eq=False)
class Storm:
    """
    One storm.

    Attributes:
        rig: The services, started.
        reference: The fault-free run.
        seed: Seed of the schedule, to be printed.
        other_weights: Another model, for faults that need it.
        readiness: Readiness that the scheduler reported, from the warm-up on.
        occurrences: Faults that were injected so far.
    """

    rig: Rig
    reference: Reference
    seed: int
    other_weights: Path | None = None
    occurrences: list[Occurrence] = field(default_factory=list)
    readiness: ReadinessWatch = field(init=False)
    _marks: list[tuple[str, float]] = field(default_factory=list)

    def run(
        self,
        schedule: Sequence[Fault],
        limit_s: float = float("inf"),
        until: Callable[[Any], object] = lambda _: True,
    ) -> list[Line]:
        """
        Inject all faults, then check all promises.

        Args:
            schedule: Faults, in this order.
            limit_s: Seconds after which no further fault begins.
            until: Condition on the counters that must be true before the streams may end.

        Raises:
            StormFailed: A promise was broken.
        """
        is_resuming = any(fault.kind in SERVER_KINDS for fault in schedule)
        retry = PATIENT if is_resuming else NO_RETRY
        streams = Streams(self.rig.address, self.reference.requests, retry)
        problems: list[str] = []
        self.readiness = ReadinessWatch(self.rig.listen)
        try:
            self._mark("warm-up")
            before = self._warm_up(streams)
            self._mark("faults")
            self._endure(schedule, streams, limit_s)
            wait_until(lambda: until(self.rig.stats()), "what the storm is to bring about")
            streams.end()
            self._mark("checks")
            problems += self._aftermath(streams, before)
            self._mark("end")
        except (AssertionError, TimeoutError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        finally:
            streams.close()
            self.readiness.close()
        lines = summarize(self.occurrences, streams.gaps)
        if problems:
            raise StormFailed(self._tell(schedule, lines, problems))
        return lines

    def phases(self) -> str:
        """Return how long each part took."""
        parts = itertools.pairwise(self._marks)
        return ", ".join(f"{name} {end_s - begin_s:.1f} s" for (name, begin_s), (_, end_s) in parts)

    def _mark(self, name: str) -> None:
        self._marks.append((name, time.monotonic()))

    def _warm_up(self, streams: Streams) -> dict[str, Holding]:
        """
        Serve every request once without a fault; return what the services hold then, as a baseline.
        """
        streams.begin(once=True)
        streams.end()
        self.rig.wait_idle()
        time.sleep(0.3)
        return holdings(self.rig.services())

    def _endure(self, schedule: Sequence[Fault], streams: Streams, limit_s: float) -> None:
        target = Target(self.rig, streams, self.readiness, self.other_weights)
        streams.begin()
        began_s = time.monotonic()
        end_s = began_s + limit_s
        self._wait_flowing(streams, began_s)
        for fault in schedule:
            if time.monotonic() > end_s:
                break
            began_s = self._occur(fault, target, began_s)
        time.sleep(1.0)
        self._wait_flowing(streams, time.monotonic())

    def _occur(self, fault: Fault, target: Target, previous_s: float) -> float:
        """Inject one fault; return the time at which it began."""
        is_link = fault.kind in LINK_KINDS
        ready_s = previous_s + fault.wait_s if is_link else time.monotonic() + fault.wait_s
        time.sleep(max(0.0, ready_s - time.monotonic()))
        before, num_held = self.rig.stats(), target.streams.num_held_tokens()
        begin_s = time.monotonic()
        inject(fault, target)
        if is_link:
            end_s = begin_s + fault.wait_s
        else:
            self._wait_flowing(target.streams, time.monotonic())
            end_s = time.monotonic()
        self.occurrences.append(
            Occurrence(
                fault=fault,
                begin_s=begin_s,
                end_s=end_s,
                recomputed_tokens=_recomputed(before, self.rig.stats(), num_held),
            )
        )
        return begin_s

    def _wait_flowing(self, streams: Streams, since_s: float) -> None:
        end_s = time.monotonic() + FLOW_S
        while not streams.flows_since(since_s):
            if time.monotonic() > end_s:
                silent = streams.num_silent_since(since_s)
                raise AssertionError(f"{silent} streams got no token for {FLOW_S:g} s")
            time.sleep(0.01)

    def _aftermath(self, streams: Streams, before: dict[str, Holding]) -> list[str]:
        """Check everything that must hold once the storm is over; return the problems."""
        problems = [problem for run in streams.runs for problem in self.reference.problems(run)]
        self.rig.wait_idle()
        wait_until(self.readiness.is_ready, "readiness")
        problems += find_leaks(before, self.rig.services())
        problems += find_problems(self.rig.logs())
        return problems

    def _tell(self, schedule: Sequence[Fault], lines: list[Line], problems: list[str]) -> str:
        shown = [*problems[:20], *([f"... {len(problems)} in all"] if len(problems) > 20 else [])]
        happened = "\n".join(str(one.fault) for one in self.occurrences)
        rest = "\n".join(str(fault) for fault in schedule[len(self.occurrences) :])
        return "\n".join(
            (
                *shown,
                f"seed {self.seed}; happened:\n{happened}\nnot yet:\n{rest}",
                table(lines),
                self.rig.log_ends(),
            )
        )


def _recomputed(before: Any, after: Any, num_held: int) -> int:
    """
    Return the tokens computed a second time between two looks at the counters. If another scheduler
    began with new counters, add the tokens that clients held at the first look.
    """
    if after.uptime_s < before.uptime_s:
        return int(num_held + after.recomputed_tokens)
    return int(after.recomputed_tokens - before.recomputed_tokens)
