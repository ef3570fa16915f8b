"""When a request that was refused may come again."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
"""Older ends say nothing of the present load."""
MAX_ENDS = 256
"""Ends remembered."""
MIN_ADVICE_S = 0.1
MAX_ADVICE_S = 60.0


class RetryAdvice:
    """
    Estimates from how fast requests ended lately how long it takes until enough more have ended.

    The time since the latest end counts, so advice grows while nothing ends.
    """

    __slots__ = ("_ends_s",)

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=MAX_ENDS)

    def note_end(self, now: float) -> None:
        """A request ended, however."""
        self._ends_s.append(now)

    def after_ends(self, count: int, now: float) -> float | None:
        """
        Seconds until `count` more requests will have ended, 0.1 to 60; None while fewer than two
        ended in the last minute.
        """
        ends_s = self._ends_s
        while ends_s and ends_s[0] < now - WINDOW_S:
            ends_s.popleft()
        if len(ends_s) < 2:
            return None
        # n ends make n - 1 gaps, and the present one is not over.
        gap_s = (now - ends_s[0]) / (len(ends_s) - 1)
        return min(max(count * gap_s, MIN_ADVICE_S), MAX_ADVICE_S)
