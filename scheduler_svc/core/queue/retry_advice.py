"""Advice on how long to wait before a refused request is sent again."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
"""Seconds that an end counts for: older ones say nothing of the present load."""
MAX_ENDS = 256
"""Most ends that are remembered."""
MIN_ADVICE_S = 0.1
MAX_ADVICE_S = 60.0


class RetryAdvice:
    """
    Estimate of the time until enough more requests have ended, from how fast they ended lately.

    The time since the latest end counts, so the advice grows while no request ends.
    """

    __slots__ = ("_ends_s",)

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=MAX_ENDS)

    def note_end(self, now: float) -> None:
        """Note that a request ended, for whatever reason."""
        self._ends_s.append(now)

    def after_ends(self, count: int, now: float) -> float | None:
        """
        Return the seconds until `count` more requests will have ended, 0.1 to 60; None while fewer
        than two ended in the last minute.
        """
        ends_s = self._ends_s
        while ends_s and ends_s[0] < now - WINDOW_S:
            ends_s.popleft()
        if len(ends_s) < 2:
            return None
        # n ends make n - 1 gaps, and the present one is not over.
        gap_s = (now - ends_s[0]) / (len(ends_s) - 1)
        return min(max(count * gap_s, MIN_ADVICE_S), MAX_ADVICE_S)
