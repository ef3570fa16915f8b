"""The table of results in README.md."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.pods.counting.accounts import Counts
from tests.deploy.pods.streams.load import Failure, Outcome
from tests.deploy.pods.streams.prompts import TOKENS

PAGE = Path(__file__).with_name("README.md")
MARK = "<!-- results -->\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """
    One row: an event, and the streams that ran meanwhile.

    Attributes:
        event: The event in words.
        outcomes: What became of the streams of each client.
        counts: What Prometheus counted.
        problems: All that is wrong but failed streams.
        ends_scheduler: True if the scheduler ended, which then counts from 0.
    """

    event: str
    outcomes: Mapping[str, Outcome]
    counts: Counts
    problems: Sequence[str]
    ends_scheduler: bool

    @property
    def failures(self) -> list[Failure]:
        """All streams that failed."""
        return [one for outcome in self.outcomes.values() for one in outcome.failures]

    @property
    def finished(self) -> int:
        """Number of all streams that finished."""
        return sum(one.finished for one in self.outcomes.values())

    @property
    def is_good(self) -> bool:
        """True if nothing failed."""
        return not self.failures and not self.problems

    def __str__(self) -> str:
        cells = [
            f"{one.running}, {one.finished}, {len(one.failures)}" for one in self.outcomes.values()
        ]
        pause_s = max(one.longest_pause_s for one in self.outcomes.values())
        return f"| {self.event} | {' | '.join(cells)} | {pause_s:.1f} s |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """
    Rows of one cluster.

    Attributes:
        setting: Overlay that was played.
        ready_s: Seconds from nothing until both executors served.
        rows: Rows of its events.
    """

    setting: str
    ready_s: float
    rows: Sequence[Row]


def page(results: Sequence[Results], num_streams: int) -> str:
    """Return what follows the mark in README.md."""
    when = dt.datetime.now(tz=dt.UTC).date()
    starts = " and ".join(f"{one.ready_s:.0f} s ({one.setting})" for one in results)
    rows = [row for one in results for row in one.rows]
    clients = list(rows[0].outcomes)
    told = (
        f"Written on {when}: {num_streams} streams at a time of {TOKENS} tokens, {os.cpu_count()} "
        f"cores; from nothing until both executors served: {starts}. In the column of each client "
        f"stand its streams that ran when the event began, that finished, and that failed."
    )
    lines = [
        f"{told}\n",
        f"| event | {' | '.join(clients)} | longest pause of a stream |",
        f"|---|{'---:|' * (len(clients) + 1)}",
        *(str(row) for row in rows),
        "",
        account(rows),
    ]
    return "\n".join(lines) + "\n"


def account(rows: Sequence[Row]) -> str:
    """Return the line that compares what clients and Prometheus counted, or all that is wrong."""
    if wrong := [f"{row.event}: {problem}" for row in rows for problem in row.problems]:
        return f"Wrong: {'; '.join(wrong)}."
    steady = [row for row in rows if not row.ends_scheduler]
    return (
        f"In the {len(steady)} events in which no scheduler ends, clients finished "
        f"{sum(row.finished for row in steady)} streams; Prometheus, which saw `up` of the scheduler "
        f"and of both gateways at 1 in every scrape of them, counted "
        f"{sum(row.counts.of_scheduler for row in steady)}. Of all events the gateways finished "
        f"{sum(row.counts.of_gateways for row in rows)} by its count."
    )


def write(results: Sequence[Results], num_streams: int) -> None:
    """Write the table into README.md, in place of the one before."""
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{page(results, num_streams)}")
