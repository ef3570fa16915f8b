"""Decisions on retries: if a failed call is tried again, and after which delay. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.error_codes import DeadlineExceeded, TandemError
from tandem.errors import HandedOver
from tandem.status import PeerUnavailable
from tandem_client.request.names import suggests_names

LONGEST_RESUME_DELAY_S = 2.0
"""Longest wait in seconds between two tries to resume a broken stream."""


@suggests_names
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """
    Policy of retries after UNAVAILABLE and RESOURCE_EXHAUSTED.

    Attributes:
        max_attempts: Largest number of tries of a call that is not accepted yet, the first
            included. 1 = never retry.
        initial_delay_s: Wait before the second try if the server advised none; it doubles with each
            further try.
        max_delay_s: Longest wait, even if the server advised more.
        resume: True: a stream that broke after it was accepted continues after the output that was
            delivered, on any server that answers.
        resume_within_s: Seconds in which a broken stream may be resumed, counted anew at each
            break. The same limit holds for a `complete` after its server stopped, which is then
            sent again as a whole.
        on_break: Called when a stream breaks or a try to resume it fails, with the error and the
            seconds until the next try.
    """

    max_attempts: int = 5
    initial_delay_s: float = 0.2
    max_delay_s: float = 10.0
    resume: bool = True
    resume_within_s: float = 120.0
    on_break: Callable[[TandemError, float], None] | None = None

    @property
    def is_final(self) -> bool:
        """True if no request is ever sent twice."""
        return self.max_attempts <= 1 and not self.resume

    def delay_s(self, error: TandemError, num_failures: int, jitter: float) -> float | None:
        """
        Return the seconds to wait before the next try, or None if `error` is final.

        Args:
            error: Error of the last try.
            num_failures: Number of tries that failed in a row, at least 1.
            jitter: Random number in [0, 1); spreads the retries of many clients.
        """
        if num_failures >= self.max_attempts or not is_transient(error):
            return None
        return self._delay_s(error, num_failures, jitter)

    def resume_delay_s(
        self, error: TandemError, num_failures: int, broken_s: float, jitter: float
    ) -> float | None:
        """
        Return the seconds to wait before a broken stream is resumed, or None if `error` is final.

        Args:
            error: Error of the last try.
            num_failures: Number of tries that failed since the last new output, at least 1.
            broken_s: Seconds since the stream broke, in which no server had the request.
            jitter: As in `delay_s`.
        """
        if not self.resume or broken_s > self.resume_within_s or not is_transient(error):
            return None
        return min(self._delay_s(error, num_failures, jitter), LONGEST_RESUME_DELAY_S)

    def _delay_s(self, error: TandemError, num_failures: int, jitter: float) -> float:
        advised = error.retry_after_s
        if advised is None:
            advised = self.initial_delay_s * 2.0 ** min(num_failures - 1, 16)
        return min(advised * (1.0 + 0.25 * jitter), self.max_delay_s)


class UnaryRetries:
    """Retries of one unary call. It does no I/O."""

    def __init__(
        self, policy: RetryPolicy, *, deadline_s: float | None = None, is_patient: bool = False
    ) -> None:
        """
        Args:
            policy: Policy of the retries.
            deadline_s: Time at which no further try is made; None = never.
            is_patient: True: after a server broke off the call, retry for as long as a broken
                stream does, if the policy resumes streams at all.
        """
        self._policy = policy
        self._deadline_s = deadline_s
        self._is_patient = is_patient and policy.resume
        self._num_failures = 0
        self._broken_since_s: float | None = None

    def timeout_s(self, now: float) -> float | None:
        """
        Return the seconds left for the next try; None without a deadline.

        Raises:
            DeadlineExceeded: The deadline has passed.
        """
        return remaining_s(self._deadline_s, now)

    def wait_s(self, error: TandemError, now: float, jitter: float) -> float:
        """
        Return the seconds to wait before the next try, at most until the deadline.

        Raises:
            TandemError: There is none; this is `error` itself.
        """
        delay = self.delay_s(error, now, jitter)
        if delay is None:
            raise error from None
        return within(delay, self._deadline_s, now)

    def delay_s(self, error: TandemError, now: float, jitter: float) -> float | None:
        """Return the seconds to wait before the next try, or None if `error` is final."""
        self._num_failures += 1
        if self._is_patient and self._broken_since_s is None and _broke_off(error):
            self._broken_since_s = now
        if self._broken_since_s is None:
            return self._policy.delay_s(error, self._num_failures, jitter)
        broken_s = now - self._broken_since_s
        return self._policy.resume_delay_s(error, self._num_failures, broken_s, jitter)


NO_RETRY = RetryPolicy(max_attempts=1, resume=False)
"""Policy that raises every failure at once."""


def remaining_s(deadline_s: float | None, now: float) -> float | None:
    """
    Return the seconds left for the next call; None without a deadline.

    Raises:
        DeadlineExceeded: The deadline has passed.
    """
    if deadline_s is None:
        return None
    if now >= deadline_s:
        raise DeadlineExceeded(
            "the deadline passed before the call could be made",
            metadata={"grpc_code": "DEADLINE_EXCEEDED"},
        )
    return deadline_s - now


def within(wait_s: float, deadline_s: float | None, now: float) -> float:
    """Return the wait, cut at the deadline."""
    return wait_s if deadline_s is None else min(wait_s, max(0.0, deadline_s - now))


def is_transient(error: TandemError) -> bool:
    """Return True if the server asked for a later retry or is unavailable."""
    return error.retry_after_s is not None or isinstance(error, PeerUnavailable)


def _broke_off(error: TandemError) -> bool:
    """Return True if a server had the call and then stopped, or its connection broke."""
    return isinstance(error, HandedOver) or (
        isinstance(error, PeerUnavailable) and error.was_connected
    )
