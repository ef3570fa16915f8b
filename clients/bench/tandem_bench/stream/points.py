"""Points of the benchmark of streams, and those that are measured without options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """
    One point to measure.

    Attributes:
        streams: Number of client streams.
        frontends: Number of frontend processes.
        stalled: Number of the streams that are not read during the measurement.
    """

    streams: int
    frontends: int
    stalled: int = 0

    @property
    def in_words(self) -> str:
        """Description in one line, for messages."""
        return f"{self.streams} streams, {self.frontends} frontends, {self.stalled} stalled"


MAIN_POINTS = (
    Point(256, 1),
    Point(256, 1, 16),
    Point(64, 1),
    Point(1024, 1),
    Point(256, 2),
    Point(1024, 2),
)
"""Points that are measured without flags, most important first."""
FULL_POINTS = (
    *(Point(streams, frontends) for streams in (64, 256, 1024) for frontends in (1, 2)),
    Point(256, 1, 16),
    Point(256, 2, 16),
)
