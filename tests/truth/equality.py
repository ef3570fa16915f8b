"""
The rule by which two runs of the same request count as equal.

Matrix libraries round differently for different batch shapes. Where the winning token leads by less
than that noise, two right runs may differ in it and in every token after it. Two runs are equal
when they agree at every position before the first one with a margin under eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

EPS_FLOAT32 = 1e-4
MIN_MEDIAN_COMPARED = 48
"""
Minimum of the median of compared tokens, out of 64; below it an equality test would say little.
"""


def compared_length(margins: Sequence[float], eps: float = EPS_FLOAT32) -> int:
    """Return how many leading tokens must agree: those before the first margin under eps."""
    for position, margin in enumerate(margins):
        if margin < eps:
            return position
    return len(margins)


@dataclass(slots=True)
class Comparison:
    """Comparisons of one test, and the check that they compared enough tokens."""

    compared: list[int] = field(default_factory=list)

    def check(
        self,
        expected: Sequence[int],
        found: Sequence[int],
        margins: Sequence[float],
        what: str,
    ) -> None:
        """Assert that `found` equals `expected`, which has these margins."""
        assert len(expected) == len(margins)
        length = compared_length(margins)
        self.compared.append(length)
        assert len(expected) == len(found), what
        assert list(expected[:length]) == list(found[:length]), what

    def assert_not_vacuous(self) -> None:
        """Assert that the median comparison covered most of its tokens."""
        assert median(self.compared) >= MIN_MEDIAN_COMPARED, self.compared
