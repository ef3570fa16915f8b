"""Common parts of the benchmarks' command lines: a parser, types of flags, and tables."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from tandem.process.exit_codes import EXIT_REFUSED

LONGEST_S = 3600.0
LARGEST_COUNT = 1 << 20


class BenchParser(argparse.ArgumentParser):
    """Parser that reports errors in one line, without usage."""

    def __init__(self, name: str, description: str | None) -> None:
        """
        Name the program after the benchmark.

        Args:
            name: Name of the benchmark.
            description: Text that `--help` prints as it is.
        """
        super().__init__(
            prog=f"tandem bench {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_list(self, flag: str, **kind: Any) -> None:
        """Add an option that takes several values, after one flag or each after its own."""
        self.add_argument(flag, nargs="+", action="extend", **kind)

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process with exit code 2."""
        self.exit(EXIT_REFUSED, f"bench: {message}; see --help\n")


def count(text: str) -> int:
    """
    Convert the value of a flag that is a count, 0 or more.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number, below 0, or over `LARGEST_COUNT`.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {text!r}")
    if len(text.lstrip("0")) > len(str(LARGEST_COUNT)) or int(text) > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_COUNT}, not {text}")
    return int(text)


def at_least_one(text: str) -> int:
    """
    Convert the value of a flag that is a count, 1 or more.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number, below 1, or over `LARGEST_COUNT`.
    """
    value = count(text)
    if not value:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def at_most(largest: int) -> Callable[[str], int]:
    """Return the type of a flag that is a count from 1 to `largest`."""

    def kind(text: str) -> int:
        value = at_least_one(text)
        if value > largest:
            raise argparse.ArgumentTypeError(f"must be at most {largest}, not {text}")
        return value

    return kind


def time_above_zero(text: str) -> float:
    """
    Convert the value of a flag that is a time in seconds.

    Raises:
        argparse.ArgumentTypeError: It is not a number between 0 and `LONGEST_S`, both excluded.
    """
    value = _number(text)
    if not 0 < value < LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be above 0 and below {LONGEST_S:g}")
    return value


def above_zero(text: str) -> float:
    """
    Convert the value of a flag that is a rate.

    Raises:
        argparse.ArgumentTypeError: It is not a finite number over 0.
    """
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError("must be above 0 and finite")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def print_row(cells: Sequence[str], headings: Iterable[str]) -> None:
    """Print one row of a table; each column is as wide as its heading."""
    print_line(
        "  ".join(cell.rjust(len(heading)) for cell, heading in zip(cells, headings, strict=True))
    )


def print_line(line: str) -> None:
    """Print a line and flush it, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
