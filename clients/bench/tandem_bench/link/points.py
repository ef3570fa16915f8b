"""Measurement of several points: a row of a table as each is measured, or all as JSON."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tandem.process.exit_codes import EXIT_DONE, EXIT_FAILED
from tandem_bench.command_line import print_line, print_row
from tandem_bench.link.processes import BenchFailed
from tandem_bench.reader.readers import ReaderFailed

Row = Mapping[str, int | float | str | None]
"""Result of one point: numbers by name, None for one that was not measured."""


class BenchPoint(Protocol):
    """One point to measure."""

    @property
    def in_words(self) -> str:
        """Description in one line, for messages."""


Point = TypeVar("Point", bound=BenchPoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """
    Form of the results of a benchmark.

    Attributes:
        name: Name of the benchmark, for messages.
        title: Line above the table.
        headings: Headings of the columns by the name of the number in a row.
    """

    name: str
    title: str
    headings: Mapping[str, str]

    def print_headings(self) -> None:
        """Print the title and the headings."""
        print_line(self.title)
        print_row(list(self.headings.values()), self.headings.values())

    def print_row(self, row: Row) -> None:
        """Print the result of one point."""
        cells = (row[name] for name in self.headings)
        print_row(["-" if cell is None else str(cell) for cell in cells], self.headings.values())


def measure_points(
    table: Table,
    points: Sequence[Point],
    measure: Callable[[Point], Row],
    *,
    as_json: bool,
    time_limit_s: float | None,
) -> int:
    """
    Measure points in turn and print the results; return the exit code.

    A point that cannot be measured is named on stderr and left out, and the exit code is 1.

    Args:
        table: Form of the results.
        points: Points to measure.
        measure: Returns the result of a point, or raises BenchFailed or ReaderFailed.
        as_json: Print one JSON list at the end, and no table.
        time_limit_s: Seconds after which no further point is begun; None = no limit.
    """
    rows: list[Row] = []
    exit_code = EXIT_DONE
    if not as_json:
        table.print_headings()
    deadline_s = time.monotonic() + (math.inf if time_limit_s is None else time_limit_s)
    for number, point in enumerate(points):
        if time.monotonic() > deadline_s:
            left = len(points) - number
            sys.stderr.write(
                f"bench {table.name}: {left} measurements left out, the machine is slow\n"
            )
            break
        try:
            row = measure(point)
        except (BenchFailed, ReaderFailed) as error:
            sys.stderr.write(f"bench {table.name}: {point.in_words}: {error}\n")
            exit_code = EXIT_FAILED
            continue
        rows.append(row)
        if not as_json:
            table.print_row(row)
    if as_json:
        print_line(json.dumps(rows))
    return exit_code
