"""The actions that do each kind of fault to one rank of an executor that has two."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.e2e.cluster import paused
from tests.faults.injecting.target import Target
from tests.faults.processes.executors import Executor
from tests.faults.schedule import Fault, Kind
from tests.waiting import wait_until

STOPPED_S = 0.3
"""Seconds in a row that a slow rank stands still; far less than it takes to count as dead."""
RUNNING_S = 0.1
NUM_RANKS = 2


def ranks_of(leader: psutil.Process) -> list[psutil.Process]:
    """
    Return the ranks of an executor that run, by number: rank 0 and those of its children that it
    told which rank they are; it may have other children for a moment.
    """
    by_number = {0: leader}
    for child in leader.children():
        with suppress(psutil.Error):  # it may end meanwhile
            if number := child.environ().get("RANK"):
                by_number[int(number)] = child
    return [by_number[number] for number in sorted(by_number)]


def _one(fault: Fault, target: Target) -> tuple[Executor, psutil.Process]:
    """Return the executor that works, and the rank of it to strike."""
    executor = target.rig.working_executor()

    def ranks() -> list[psutil.Process]:
        leader = executor.process()
        found = [] if leader is None else ranks_of(leader)
        return found if len(found) == NUM_RANKS else []

    return executor, wait_until(ranks, "all ranks of an executor")[fault.draw % NUM_RANKS]


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
        with paused(rank.pid):
            time.sleep(STOPPED_S)
        time.sleep(RUNNING_S)
    assert pid == executor.pid, "an executor ended because one of its ranks was slow"


RANK_ACTIONS: dict[Kind, Callable[[Fault, Target], None]] = {
    Kind.RANK_KILLED: _kill,
    Kind.RANK_STOPPED: _stop,
    Kind.RANK_SLOWED: _slow,
}
