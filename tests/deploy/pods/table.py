"""The table of results in README.md."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.events.streams.callers import HTTP
from tests.deploy.events.streams.prompts import TOKENS
from tests.deploy.events.table import COLUMNS, RESULTS, Row, lines_of, write_between
from tests.deploy.pods.counting.accounts import Counts

PAGE = Path(__file__).with_name("README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A row, and what Prometheus counted meanwhile."""

    row: Row
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """
    Rows of one cluster.

    Attributes:
        setting: Overlay that was played.
        ready_s: Seconds from nothing until both executors served.
        counted: Rows of its events, with counts.
    """

    setting: str
    ready_s: float
    counted: Sequence[Counted]


def page(results: Sequence[Results], num_streams: int) -> str:
    """Return what stands after the mark in README.md."""
    when = dt.datetime.now(tz=dt.UTC).date()
    starts = " and ".join(f"{one.ready_s:.0f} s ({one.setting})" for one in results)
    counted = [one for of_cluster in results for one in of_cluster.counted]
    told = (
        f"Written on {when}: {num_streams} streams at a time of {TOKENS} tokens, {os.cpu_count()} "
        f"cores; from nothing until both executors served: {starts}. {COLUMNS}"
    )
    return (
        "\n".join([f"{told}\n", *lines_of([one.row for one in counted]), "", account(counted)])
        + "\n"
    )


def account(counted: Sequence[Counted]) -> str:
    """Return the line that compares what clients and Prometheus counted, or all that is wrong."""
    rows = [one.row for one in counted]
    if problems := [f"{row.event}: {problem}" for row in rows for problem in row.problems]:
        return f"Wrong: {'; '.join(problems)}."
    steady = [one for one in counted if not one.row.ends_scheduler]
    of_gateways = [one for one in counted if not one.row.ends_gateway]
    return (
        f"In the {len(steady)} events in which no scheduler ends, clients finished "
        f"{sum(one.row.finished for one in steady)} streams; Prometheus counted "
        f"{sum(one.counts.of_scheduler for one in steady)}, and saw `up` at 1 in every scrape of the "
        f"pods that did not end. In the {len(of_gateways)} events in which no gateway ends, clients "
        f"over HTTP finished {sum(one.row.outcomes[HTTP].finished for one in of_gateways)} streams; "
        f"Prometheus counted {sum(one.counts.of_gateways for one in of_gateways)}."
    )


def write(results: Sequence[Results], num_streams: int) -> None:
    """Write the table into README.md, in place of the one before."""
    write_between(PAGE, RESULTS, page(results, num_streams))
