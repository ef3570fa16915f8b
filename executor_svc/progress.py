"""Whether steps complete in the time that steps like them took before."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ALLOWED_S = 10.0
SLACK = 20.0
"""A step may take this many times what its tokens predict before it counts as stuck."""

_FORGET = 0.9
"""Weight of the past in the moving average of seconds per token."""


@dataclass(frozen=True, slots=True)
class _Running:
    started_s: float
    allowed_s: float


class Progress:
    """
    Learns seconds per token and says whether the running step is older than it should ever get.

    Written by the runner thread, read by the heartbeat thread: the one value shared is replaced
    whole. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None
        self._running: _Running | None = None

    def start(self, num_tokens: int, now_s: float) -> None:
        """Note that a step begins."""
        predicted_s = (self._seconds_per_token or 0.0) * num_tokens
        self._running = _Running(now_s, max(MIN_ALLOWED_S, SLACK * predicted_s))

    def end(self) -> None:
        """Note that the step is over, however it ended."""
        self._running = None

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took that went well."""
        if num_tokens == 0:
            return
        latest = seconds / num_tokens
        past = latest if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = _FORGET * past + (1 - _FORGET) * latest

    def is_stuck(self, now_s: float) -> bool:
        """Tell whether a step is running for longer than it may."""
        running = self._running
        return running is not None and now_s - running.started_s > running.allowed_s
