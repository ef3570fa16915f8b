"""When a failed call is tried again, and after how long: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import TandemError
from tandem.status import PeerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """
    How calls recover by themselves from UNAVAILABLE and RESOURCE_EXHAUSTED.

    Attributes:
        max_attempts: Most tries of one call, the first included; a stream starts counting again
            whenever it delivered something new. 1 = never retry.
        initial_delay_s: Wait before the second try where the server advised nothing; doubles.
        max_delay_s: Longest wait, whatever the server advised.
        resume: True: a stream that broke in the middle is asked for again with the seed it ran
            with, and goes on after what was delivered.
    """

    max_attempts: int = 5
    initial_delay_s: float = 0.2
    max_delay_s: float = 10.0
    resume: bool = True

    def delay_s(self, error: TandemError, num_failures: int, jitter: float) -> float | None:
        """
        Seconds to wait before the next try, or None if `error` is final.

        Args:
            error: What the last try ended with.
            num_failures: Tries that failed in a row, at least 1.
            jitter: Random number in [0, 1); spreads the retries of many clients.
        """
        if num_failures >= self.max_attempts or not is_transient(error):
            return None
        advised = error.retry_after_s
        if advised is None:
            advised = self.initial_delay_s * 2.0 ** (num_failures - 1)
        return min(advised * (1.0 + 0.25 * jitter), self.max_delay_s)


NO_RETRY = RetryPolicy(max_attempts=1, resume=False)
"""Every failure is raised at once."""


def is_transient(error: TandemError) -> bool:
    """True where the server asked for a later retry, or could not be reached at all."""
    return error.retry_after_s is not None or isinstance(error, PeerUnavailable)
