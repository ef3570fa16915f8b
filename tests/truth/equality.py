"""
When two runs of the same request count as equal.

Matrix libraries round differently for different batch shapes, so a token whose winner led by less
than the noise may differ between two right runs, and everything after it with it. Two runs are
equal when they agree at every position up to the first one whose margin is under eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

EPS_FLOAT32 = 1e-4
MIN_MEDIAN_COMPARED = 48
"""Of 64 tokens; below it an equality test would say little."""


def compared_length(margins: Sequence[float], eps: float = EPS_FLOAT32) -> int:
    """How many leading tokens must agree: those before the first margin under eps."""
    for position, margin in enumerate(margins):
        if margin < eps:
            return position
    return len(margins)


@dataclass(slots=True)
class Comparison:
    """Collects comparisons of one test, and says whether they compared enough."""

    compared: list[int] = field(default_factory=list)

    def check(
        self,
        expected: Sequence[int],
        found: Sequence[int],
        margins: Sequence[float],
        what: str,
    ) -> None:
        """Assert that `found` equals `expected`, whose margins are given."""
        assert len(expected) == len(margins)
        length = compared_length(margins)
        self.compared.append(length)
        assert len(expected) == len(found), what
        assert list(expected[:length]) == list(found[:length]), what

    def assert_not_vacuous(self) -> None:
        """Assert that at least the median comparison covered most of its tokens."""
        assert median(self.compared) >= MIN_MEDIAN_COMPARED, self.compared
