"""
The faults of a storm and their times: a pure function of a seed, which a failing storm prints, so
that the same storm can be run again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of faults."""

    # Faults of the connection between scheduler and executor, as bytes.
    RESET = "connection reset"
    BLACKHOLE = "packets dropped, no reset"
    SLOW_LINK = "slow link"
    CUT_FRAME = "frame truncated"
    CORRUPT_BYTES = "bytes corrupted"
    UNREACHABLE = "executor unreachable for long"
    # Faults of the same connection, as messages.
    DUPLICATED = "message duplicated"
    REORDERED = "messages reordered"
    DROPPED = "message dropped"
    CUT_MESSAGE = "message truncated"
    CORRUPT_MESSAGE = "message corrupted"
    # Faults of the connections of clients.
    CLIENT_RESET = "clients' connections reset"
    # Faults of processes.
    EXECUTOR_KILLED = "executor killed"
    EXECUTOR_PAUSED = "executor paused shortly"
    EXECUTOR_HUNG = "executor paused for long"
    EXECUTOR_DRAINED = "executor told to stop"
    OTHER_WEIGHTS = "other weights for a while"
    SCHEDULER_KILLED = "scheduler killed"
    SCHEDULER_STOPPED = "scheduler told to stop"
    SCHEDULER_PAUSED = "scheduler paused"
    FRONTEND_PAUSED = "frontend paused"
    FRONTEND_KILLED = "frontend killed"
    # Faults of one of several executors that serve together, while two others serve.
    ONE_KILLED = "one of several killed"
    ONE_STOPPED = "one of several stopped until its work moved"
    ONE_TOLD_TO_STOP = "one of several told to stop"
    ONE_DRAINED = "one of several drained and added again"
    ONE_REMOVED = "one of several removed and added again"
    # Faults of one rank of an executor that has several.
    RANK_KILLED = "one rank killed"
    RANK_STOPPED = "one rank stopped until it is missed"
    RANK_SLOWED = "one rank made slow for a while"
    # Faults of the computation.
    STEP_RAISES = "step raises"
    STEP_HANGS = "step never returns"
    BAD_ROW = "NaN in one row"
    POISON = "request kills executors"
    # Faults of disk and clock.
    DISK_FULL = "disk full for logs"
    CLOCK_JUMP = "clock jumps"


BYTE_KINDS = (Kind.RESET, Kind.BLACKHOLE, Kind.SLOW_LINK, Kind.CUT_FRAME, Kind.CORRUPT_BYTES)
MESSAGE_KINDS = (
    Kind.DUPLICATED,
    Kind.REORDERED,
    Kind.DROPPED,
    Kind.CUT_MESSAGE,
    Kind.CORRUPT_MESSAGE,
)
FLEET_KINDS = (
    Kind.ONE_KILLED,
    Kind.ONE_STOPPED,
    Kind.ONE_TOLD_TO_STOP,
    Kind.ONE_DRAINED,
    Kind.ONE_REMOVED,
)
RANK_KINDS = (Kind.RANK_KILLED, Kind.RANK_STOPPED, Kind.RANK_SLOWED)
LINK_KINDS = (*BYTE_KINDS, *MESSAGE_KINDS)
SERVER_KINDS = (
    Kind.CLIENT_RESET,
    Kind.SCHEDULER_KILLED,
    Kind.SCHEDULER_STOPPED,
    Kind.FRONTEND_KILLED,
)
"""Kinds after which a stream goes on because its client asks for the rest."""
LASTING_S: dict[Kind, tuple[float, float]] = {
    Kind.BLACKHOLE: (0.3, 0.8),
    Kind.SLOW_LINK: (0.4, 0.8),
    Kind.EXECUTOR_PAUSED: (2.6, 3.4),
    Kind.SCHEDULER_PAUSED: (1.0, 3.0),
    Kind.FRONTEND_PAUSED: (1.0, 3.0),
    Kind.OTHER_WEIGHTS: (1.0, 2.0),
    Kind.RANK_SLOWED: (1.0, 2.0),
    Kind.DISK_FULL: (1.0, 2.0),
}
"""
Seconds that a fault of a kind lasts, from and to; others are over at once or end by themselves.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    One fault.

    Attributes:
        kind: Kind of the fault.
        is_upward: True if a link fault hits the executor's messages, not the scheduler's; for
            others one of two ways to act. It is so for every other fault of a kind.
        lasts_s: Seconds that it lasts; 0 for a fault that is over at once.
        wait_s: Seconds before it: for link faults since the fault before began, for others since
            tokens flow again.
        draw: Random number that decides everything else, for example which bit flips.
    """

    kind: Kind
    is_upward: bool
    lasts_s: float
    wait_s: float
    draw: int

    def __str__(self) -> str:
        way = f" {'up' if self.is_upward else 'down'}" if self.kind in LINK_KINDS else ""
        lasting = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.kind}{way}{lasting} after {self.wait_s:.2f} s [{self.draw}]"


def make_schedule(seed: int, kinds: Sequence[Kind], times: int) -> tuple[Fault, ...]:
    """
    Return each kind of fault so many times, in an order drawn from the seed; link faults begin every
    second, others at least a second after tokens flow again.

    Args:
        seed: Seed; the same one gives the same schedule.
        kinds: Kinds of faults; one that is there twice occurs twice as often.
        times: Number of faults of each kind.
    """
    source = random.Random(seed)
    order = [kind for kind in kinds for _ in range(times)]
    source.shuffle(order)
    ways = {kind: itertools.cycle(source.sample((False, True), 2)) for kind in dict.fromkeys(kinds)}
    return tuple(_fault(kind, next(ways[kind]), source) for kind in order)


def _fault(kind: Kind, is_upward: bool, source: random.Random) -> Fault:
    shortest, longest = LASTING_S.get(kind, (0.0, 0.0))
    return Fault(
        kind=kind,
        is_upward=is_upward,
        lasts_s=round(source.uniform(shortest, longest), 2),
        wait_s=1.0 if kind in LINK_KINDS else round(source.uniform(1.0, 1.4), 2),
        draw=source.getrandbits(32),
    )
