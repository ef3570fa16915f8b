"""
Verdicts on how cases end: good, a failure of the service, or one that has to be sent again.

On a busy machine a deadline that passes proves nothing: a service that gets no processor is late,
not hung. Such a case is a suspect, which is sent again after all others, alone and with a generous
deadline, and is a hang only if it does not end then either.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import grpc

from tandem.status import from_rpc_error
from tests.faults.fuzz.cases import Case

LIMIT_S = 60.0
"""Deadline of a case that is sent beside others."""
PATIENT_S = 120.0
"""Deadline of a suspect, which is sent alone."""
NUM_AT_ONCE = 64
MAX_SHOWN = 10
"""Most failures of a kind that are kept; after as many failed suspects the others count as such."""
BAD_CODES = frozenset({"INTERNAL", "UNKNOWN"})
HANGS = "hangs"
NOT_DECODED = "are not a valid message"
"""Part of the refusal of bytes that are no message."""
_MADE_HERE = "Internal error from Core"
"""Text of gRPC's client for a write to a call that the server has ended."""


class Verdict(enum.Enum):
    """Judgement of one end."""

    GOOD = enum.auto()
    BAD = enum.auto()
    SUSPECT = enum.auto()


@dataclass(frozen=True, slots=True)
class End:
    """How a case ended: a status, whether that is a failure, and whether it was decoded."""

    name: str
    verdict: Verdict = Verdict.GOOD
    is_decoded: bool = True


OK = End("OK")
Send = Callable[[Case, float], Awaitable[End]]
"""Sends a case with a deadline in seconds."""


@dataclass(slots=True)
class Outcome:
    """
    Ends of the cases of one kind.

    Attributes:
        ends: Number of cases by reason, or by gRPC code where there was none.
        decoded: Number of cases that got past decoding.
        num_suspects: Number of cases that were sent again.
        num_bad: Number of failures.
        bad: The first few failures, each with its case if it has one.
    """

    ends: Counter[str] = field(default_factory=Counter)
    decoded: int = 0
    num_suspects: int = 0
    num_bad: int = 0
    bad: list[tuple[str, Case | None]] = field(default_factory=list)

    def note(self, end: End, case: Case) -> None:
        """Count one case; a suspect that is noted has been sent again, and is a failure."""
        self.ends[end.name] += 1
        self.decoded += end.is_decoded
        if end.verdict is not Verdict.GOOD:
            self.num_bad += 1
            if len(self.bad) < MAX_SHOWN:
                self.bad.append((end.name, case))

    def fail(self, what: str) -> None:
        """Count a failure that no single case has caused."""
        self.num_bad += 1
        if len(self.bad) < MAX_SHOWN:
            self.bad.append((what, None))

    def add(self, other: Outcome) -> None:
        """Count the cases of another run too."""
        self.ends += other.ends
        self.decoded += other.decoded
        self.num_suspects += other.num_suspects
        self.num_bad += other.num_bad
        self.bad = (self.bad + other.bad)[:MAX_SHOWN]


async def judge(
    cases: Iterable[Case],
    send: Send,
    *,
    at_once: int = NUM_AT_ONCE,
    limit_s: float = LIMIT_S,
    patient_s: float = PATIENT_S,
) -> Outcome:
    """
    Send cases, many at a time, then suspects again, one by one, and count how all ended.

    Args:
        cases: The cases, drawn one by one as they are sent.
        send: Sends one.
        at_once: Number of cases in flight.
        limit_s: Deadline of each, seconds.
        patient_s: Deadline of a suspect, seconds.
    """
    left, outcome = iter(cases), Outcome()
    suspects: list[tuple[End, Case]] = []

    async def work() -> None:
        for case in left:
            end = await send(case, limit_s)
            if end.verdict is Verdict.SUSPECT:
                suspects.append((end, case))
            else:
                outcome.note(end, case)

    await asyncio.gather(*(work() for _ in range(at_once)))
    outcome.num_suspects = len(suspects)
    for first, case in suspects:
        # A service that answers no suspect would cost a deadline for each of them.
        is_lost = outcome.num_bad >= MAX_SHOWN
        outcome.note(first if is_lost else await send(case, patient_s), case)
    return outcome


def end_of(error: grpc.aio.AioRpcError) -> End:
    """
    Judge the status of a call.

    INTERNAL and UNKNOWN are failures, typed or not, with one exception. Where a server has ended a
    call while gRPC's client still writes, with any status, the client reports INTERNAL of its own,
    whose text is "Internal error from Core" and which has no details; the status that arrived is
    lost. Such a case is a suspect: it is not dropped, but a failure if it ends so again when it is
    sent alone. A status with ErrorInfo of ours has arrived, whatever its text.
    """
    code, typed = error.code().name, from_rpc_error(error)
    verdict, name = Verdict.GOOD, f"{code} {typed.reason}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        verdict, name = Verdict.SUSPECT, HANGS
    elif code in BAD_CODES:
        verdict = Verdict.SUSPECT if is_made_here(error) else Verdict.BAD
    return End(name, verdict, is_decoded=NOT_DECODED not in typed.message)


def is_made_here(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC's client made an INTERNAL status itself, and none arrived."""
    text = error.details() or ""
    return text.startswith(_MADE_HERE) and not error.trailing_metadata()
