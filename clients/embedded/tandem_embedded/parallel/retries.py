"""Failed steps of an engine's runners, and how often they are computed again."""

from __future__ import annotations

from collections import Counter

from tandem.errors import ExecutorLost, TandemError

MAX_STEP_RETRIES = 2
"""Number of times that a failed step of a runner is computed again while no token is new."""


class Retries:
    """
    Failed steps of each runner since the last new token of any of them.

    A runner has retries left until it has failed more than `MAX_STEP_RETRIES` times. One that has
    none gets no step while one that has some computes. Beside idle runners it goes on, as the core
    may want to try requests on it, until more steps have failed than are retries for each runner;
    then all requests fail.

    **Steps do not fail forever.** While no token is new, a runner fails at most
    `MAX_STEP_RETRIES` + 1 times until it has no retries left, and runners without any have a
    limited number of steps in all. Two rules are needed for that:

    - The engine gives up although idle runners have retries left. The core may have nothing for
      them, such as while requests are suspected and confined to another runner.
    - A result without a token does not count as progress. A prompt of several chunks could fail at
      the same one forever. New tokens cannot go on forever, as each request has a limited number.

    Steps for which memory ran out do not count at all: the core bounds them.
    """

    def __init__(self, num_runners: int) -> None:
        self._num_runners = num_runners
        self._failures = Counter[int]()
        """Failed steps by the runner's number."""
        self._latest: Exception | None = None

    def note_failure(self, runner: int, error: Exception) -> None:
        """Count a failed step of a runner."""
        self._failures[runner] += 1
        self._latest = error

    def reset(self) -> None:
        """Forget all failures, after a new token or once all requests have failed."""
        self._failures.clear()
        self._latest = None

    def are_left(self, runner: int) -> bool:
        """Return True for a runner that has not failed too often."""
        return self._failures[runner] <= MAX_STEP_RETRIES

    @property
    def final_error(self) -> TandemError | None:
        """Error with which all requests are to fail, if too many steps failed; None until then."""
        num_failures = self._failures.total()
        if self._latest is None or num_failures <= MAX_STEP_RETRIES * self._num_runners:
            return None
        if isinstance(self._latest, TandemError):
            return self._latest
        return ExecutorLost(
            f"steps failed {num_failures} times without a new token, at last so: {self._latest}"
        )
