"""Steps on their way at a runner: computed by a thread, or launched by a runner that goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from tandem.errors import SessionLost
from tandem.link.results import StepResult


class StepUnderWay(Protocol):
    """A step that a runner was given, until its result is applied."""

    @property
    def has_arrived(self) -> bool:
        """True once `result` need not be waited for by others than who asks."""

    def result(self) -> StepResult:
        """Wait for the result, and return it at each call; raises the error of a failed step."""

    def settle(self) -> None:
        """Wait for the end, whatever it is."""


class Computing:
    """A step that a thread computes, or that is computed already."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    @property
    def has_arrived(self) -> bool:
        """True once it is computed, or has failed."""
        return self._future.done()

    def result(self) -> StepResult:
        """See `StepUnderWay.result`."""
        return self._future.result()

    def settle(self) -> None:
        """See `StepUnderWay.settle`."""
        wait((self._future,))


class Launched:
    """A step that a runner has begun; who asks for its result waits, as nothing tells its end."""

    has_arrived = True

    def __init__(self, collect: Callable[[], StepResult]) -> None:
        """
        Args:
            collect: Waits for the result; called once. Raises the error of a failed step.
        """
        self._collect: Callable[[], StepResult] | None = collect
        # An interruption, such as Ctrl-C, ends the wait without another outcome.
        self._ended: StepResult | Exception = SessionLost("waiting for a step was interrupted")

    def result(self) -> StepResult:
        """See `StepUnderWay.result`."""
        self.settle()
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def settle(self) -> None:
        """See `StepUnderWay.settle`."""
        collect, self._collect = self._collect, None
        if collect is None:
            return
        try:
            self._ended = collect()
        except Exception as error:  # noqa: BLE001  # raised again by `result`
            self._ended = error
