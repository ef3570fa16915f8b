"""What the command lines of benchmarks have in common: kinds of flags, and tables."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence

LONGEST_S = 3600.0


def count(text: str) -> int:
    """
    Of a flag that counts.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number, or below 0.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def at_least_one(text: str) -> int:
    """
    Of a flag that counts what there must be.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number, or below 1.
    """
    value = count(text)
    if not value:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def time_above_zero(text: str) -> float:
    """
    Of a flag that is a time.

    Raises:
        argparse.ArgumentTypeError: It is not over 0, or absurd.
    """
    value = float(text)
    if not 0 < value < LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be above 0 and below {LONGEST_S:g}")
    return value


def above_zero(text: str) -> float:
    """
    Of a flag that is a rate.

    Raises:
        argparse.ArgumentTypeError: It is not a number over 0.
    """
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def print_row(cells: Sequence[str], headings: Iterable[str]) -> None:
    """Print a line of a table; each column is as wide as its heading."""
    print_line(
        "  ".join(cell.rjust(len(heading)) for cell, heading in zip(cells, headings, strict=True))
    )


def print_line(line: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
