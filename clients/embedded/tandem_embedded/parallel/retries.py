"""Failed steps of an engine's runners, and how often they are computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tandem.errors import ExecutorLost, TandemError

MAX_STEP_RETRIES = 2
"""Number of times that a failed step of a runner is computed again while there is no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """
    End of the requests with which no runner may get on.

    Attributes:
        error: Their error.
        handles: Handles of those that were live at the latest failure; others were in no step yet.
    """

    error: TandemError
    handles: AbstractSet[int]


class Retries:
    """
    Failed steps of each runner since the last progress of any of them.

    A runner has retries left until it has failed more than `MAX_STEP_RETRIES` times. One that has
    none gets no step while one that has some computes. Beside idle runners it goes on, as the core
    may want to try requests on it, until more steps have failed than are retries for each runner;
    then all requests fail.

    **Progress** is a new token, the end of a request that was live at the latest failure, or a step
    after which more of a request is computed than ever since the last of these two. So there is a
    limited amount of it: a request ends once and has a limited number of tokens, which are computed
    one after the other. A prompt of many chunks gets on from one failure to the next, but not by
    the chunks that it repeats. A verdict is no progress, though it ends requests: failures count
    anew after it.

    **Steps do not fail forever.** While there is no progress, a runner fails at most
    `MAX_STEP_RETRIES` + 1 times until it has no retries left, and runners without any have a
    limited number of steps in all. The engine gives up although idle runners have retries left: the
    core may have nothing for them, such as while requests are suspected and confined to another
    runner.

    The core itself bounds two kinds of failed steps. Those that it blames on their requests count
    for their runner alone: it finds out which requests to end, however many failures that takes.
    Those for which memory ran out do not count at all.
    """

    def __init__(self, num_runners: int) -> None:
        self._num_runners = num_runners
        self._failures = Counter[int]()
        """Failed steps by the runner's number."""
        self._num_unexplained = 0
        """Number of those that are not blamed on requests."""
        self._latest: Exception | None = None
        self._handles: AbstractSet[int] = frozenset()
        self._furthest: dict[int, int] = {}
        """Most tokens computed of each request since the last `reset`, as far as known."""

    @property
    def has_failures(self) -> bool:
        """True while progress would make a difference."""
        return bool(self._failures)

    def note_failure(
        self, runner: int, error: Exception, computed: Mapping[int, int], *, is_blamed: bool
    ) -> None:
        """
        Count a failed step.

        Args:
            runner: Number of the runner.
            error: Error of the step.
            computed: Number of tokens that were computed of each live request, by handle.
            is_blamed: True where the core blames the failure on the requests of the step.
        """
        self.note_live(computed.keys())
        self._failures[runner] += 1
        self._num_unexplained += not is_blamed
        self._latest, self._handles = error, computed.keys()
        self._gets_further(computed)

    def note_computed(self, computed: Mapping[int, int]) -> None:
        """Note how many tokens of each live request are computed after a step without a token."""
        if self._gets_further(computed):
            self._forget_failures()

    def note_live(self, handles: AbstractSet[int]) -> None:
        """Note which requests are live: others that were at the latest failure have ended."""
        if not self._handles <= handles:
            self.reset()

    def reset(self) -> None:
        """Start anew, after a new token, the end of a request or a verdict."""
        self._forget_failures()
        self._furthest.clear()

    def are_left(self, runner: int) -> bool:
        """Return True for a runner that has not failed too often."""
        return self._failures[runner] <= MAX_STEP_RETRIES

    @property
    def verdict(self) -> Verdict | None:
        """The requests that are to fail, if too many steps failed; None until then."""
        error, num_failures = self._latest, self._failures.total()
        if error is None or self._num_unexplained <= MAX_STEP_RETRIES * self._num_runners:
            return None
        if not isinstance(error, TandemError):
            error = ExecutorLost(
                f"steps failed {num_failures} times without progress, at last so: {error}"
            )
        return Verdict(error=error, handles=self._handles)

    def _gets_further(self, computed: Mapping[int, int]) -> bool:
        """Note what is computed of each request; return True if that is more than ever of one."""
        further = {
            handle: count
            for handle, count in computed.items()
            if count > self._furthest.get(handle, 0)
        }
        self._furthest |= further
        return bool(further)

    def _forget_failures(self) -> None:
        self._failures.clear()
        self._num_unexplained = 0
        self._latest, self._handles = None, frozenset()
