"""Whether steps complete in the time that steps like them took before."""

from __future__ import annotations

MIN_ALLOWED_S = 10.0
SLACK = 20.0
"""A step may take this many times what its tokens predict before it counts as stuck."""

_FORGET = 0.9
"""Weight of the past in the moving average of seconds per token."""


class Progress:
    """
    Learns seconds per token and says how long a step may take.

    Written by the runner thread, read by the heartbeat thread: single numbers, replaced whole.
    """

    def __init__(self) -> None:
        self._seconds_per_token = 0.0
        self._running_tokens = 0

    def started(self, num_tokens: int) -> None:
        """Note what the step now computing has to do."""
        self._running_tokens = num_tokens

    def completed(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that ended."""
        if num_tokens == 0:
            return
        latest = seconds / num_tokens
        if self._seconds_per_token == 0.0:
            self._seconds_per_token = latest
        else:
            self._seconds_per_token += (1 - _FORGET) * (latest - self._seconds_per_token)

    def is_stuck(self, elapsed_s: float) -> bool:
        """Tell whether the running step is older than it should ever get."""
        predicted_s = self._seconds_per_token * self._running_tokens
        return elapsed_s > max(MIN_ALLOWED_S, SLACK * predicted_s)
