"""The table that a storm prints: a line for each kind of fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.schedule import Fault, Kind
from tests.faults.workload.streams import Gap

AFFECTED_S = 0.5
"""Silence in seconds that counts a stream as affected by a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """
    One fault that was injected, in monotonic seconds.

    Attributes:
        fault: The fault as scheduled.
        begin_s: Time at which it was injected.
        end_s: Time at which all streams had tokens again, or the next fault began.
        recomputed_tokens: Tokens computed again in between.
    """

    fault: Fault
    begin_s: float
    end_s: float
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Effects of a storm's faults of one kind, all times together."""

    kind: str
    times: int
    affected_streams: float
    longest_pause_s: float
    recomputed_tokens: int


def summarize(occurrences: Sequence[Occurrence], gaps: Sequence[Gap]) -> list[Line]:
    """Return a line per kind; the number of streams affected is the mean of its times."""
    lines = []
    for kind in Kind:
        times = [one for one in occurrences if one.fault.kind is kind]
        if not times:
            continue
        overlapping = [[gap for gap in gaps if _overlaps(gap, one)] for one in times]
        affected = [
            len({gap.worker for gap in around if gap.end_s - gap.begin_s > AFFECTED_S})
            for around in overlapping
        ]
        pauses = [gap.end_s - gap.begin_s for around in overlapping for gap in around]
        lines.append(
            Line(
                kind=str(kind),
                times=len(times),
                affected_streams=round(sum(affected) / len(times), 1),
                longest_pause_s=round(max(pauses, default=0.0), 2),
                recomputed_tokens=sum(one.recomputed_tokens for one in times),
            )
        )
    return lines


def table(lines: Sequence[Line]) -> str:
    """Return the lines as Markdown."""
    rows = ["| fault | times | streams affected | longest pause | recomputed tokens |"]
    rows.append("|---|---|---|---|---|")
    rows += [
        f"| {line.kind} | {line.times} | {line.affected_streams:g} "
        f"| {line.longest_pause_s:.2f} s | {line.recomputed_tokens} |"
        for line in lines
    ]
    return "\n".join(rows)


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the lines as values for JSON."""
    return [asdict(line) for line in lines]


def _overlaps(gap: Gap, one: Occurrence) -> bool:
    return gap.begin_s < one.end_s and gap.end_s > one.begin_s
