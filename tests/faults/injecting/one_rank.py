"""The actions that do each kind of fault to one rank of an executor that has several."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from tests.faults.injecting.target import Target
from tests.faults.processes.executors import Executor
from tests.faults.schedule import Fault, Kind
from tests.waiting import wait_until

STOPPED_S = 0.3
"""Seconds in a row that a slow rank stands still; far less than it takes to count as dead."""
RUNNING_S = 0.1


def _one(fault: Fault, target: Target) -> tuple[Executor, psutil.Process]:
    """Return the executor that works, and the rank of it to strike."""
    executor = target.rig.working_executor()

    def ranks() -> list[psutil.Process]:
        leader = executor.process()
        others = leader.children() if leader is not None else []
        return [leader, *others] if leader is not None and others else []

    family = wait_until(ranks, "all ranks of an executor")
    return executor, family[fault.draw % len(family)]


def _kill(fault: Fault, target: Target) -> None:
    _lose(fault, target, psutil.Process.kill)


def _stop(fault: Fault, target: Target) -> None:
    """Stop a rank, which none but the other ranks can notice."""
    _lose(fault, target, psutil.Process.suspend)


def _lose(fault: Fault, target: Target, strike: Callable[[psutil.Process], object]) -> None:
    """Strike a rank; return once all have ended: until then rank 0 may give out tokens."""
    executor, rank = _one(fault, target)
    pid = executor.pid
    strike(rank)
    wait_until(lambda: executor.pid not in (0, pid), "the ranks to end and to be started again")


def _slow(fault: Fault, target: Target) -> None:
    """Let a rank stand still most of the time; its executor must not end over that."""
    executor, rank = _one(fault, target)
    pid = executor.pid
    end_s = time.monotonic() + fault.lasts_s
    while time.monotonic() < end_s:
        rank.suspend()
        time.sleep(STOPPED_S)
        rank.resume()
        time.sleep(RUNNING_S)
    assert pid == executor.pid, "an executor ended because one of its ranks was slow"


RANK_ACTIONS: dict[Kind, Callable[[Fault, Target], None]] = {
    Kind.RANK_KILLED: _kill,
    Kind.RANK_STOPPED: _stop,
    Kind.RANK_SLOWED: _slow,
}
