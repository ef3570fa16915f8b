"""The choice of a tuning from measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.gpu.rates.sweep.points import Point
from tests.gpu.rates.sweep.tables import Tuning

TIE = 0.02
"""Share of time within which the present entry stays: repeated measurements differ by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """
    The best tuning of an entry.

    Attributes:
        best: Tuning to use.
        ratio: Its time over the present entry's, weighted; 1 for the present entry.
        num_points: Number of points that it was judged by.
    """

    best: Tuning
    ratio: float
    num_points: int


Seconds = Mapping[Point, Mapping[Tuning, float]]


def choose(seconds: Seconds, now: Tuning) -> Choice | None:
    """
    Choose the tuning with the least weighted time, or the present one within 2 % of it.

    A point's times are divided by the present entry's there, so that short and long shapes count by
    their weights alone. Tunings that were not timed at every point do not count.

    Args:
        seconds: Times by point and tuning, of points at which all tunings were tried.
        now: Present entry.

    Returns:
        The choice, or None if the present entry was timed nowhere.
    """
    timed = {point: times for point, times in seconds.items() if now in times}
    if not timed:
        return None
    total = sum(point.weight for point in timed)
    score = {
        tuning: sum(point.weight * times[tuning] / times[now] for point, times in timed.items())
        / total
        for tuning in set.intersection(*map(set, timed.values()))
    }
    best = min(score, key=lambda tuning: (score[tuning], repr(tuning)))
    if score[best] > 1 - TIE:
        best = now
    return Choice(best=best, ratio=score[best], num_points=len(timed))
