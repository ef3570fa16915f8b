"""Least time between two deltas of a stream, by the number of streams that run."""

from __future__ import annotations

LONGEST_S = 10.0
"""Longest interval that schedulers take."""
NUM_PROMPT = 8
"""Most streams of which each token is sent at once."""
LOADED_INTERVAL_S = 0.04
"""
Interval of streams that begin beside more: 25 chunks a second still look like a steady flow. There
is none in between: intervals shorter than a step join nothing, and different ones part the events
that a batch would send together.
"""


def adaptive_interval_s(num_streams: int) -> float:
    """
    Return the interval of a stream that begins as one of so many. A chunk costs nearly the same
    with one token as with many, so that under load fewer chunks leave more time for tokens.
    """
    return 0.0 if num_streams <= NUM_PROMPT else LOADED_INTERVAL_S


class DeltaIntervals:
    """Intervals of the streams of one gateway; it owns the number of those that run."""

    def __init__(self, fixed_s: float | None) -> None:
        """
        Args:
            fixed_s: Interval of all streams in seconds; None = by the number of streams.
        """
        self._fixed_s = fixed_s
        self._num_streams = 0

    def begin(self, num_streams: int) -> float:
        """Count streams that begin, and return their interval in seconds."""
        self._num_streams += num_streams
        if self._fixed_s is not None:
            return self._fixed_s
        return adaptive_interval_s(self._num_streams)

    def end(self, num_streams: int) -> None:
        """Forget streams that have ended."""
        self._num_streams -= num_streams
