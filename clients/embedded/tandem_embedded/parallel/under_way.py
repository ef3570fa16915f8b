"""Steps on their way at a runner: computed by a thread, or launched by a runner that goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import structlog

from tandem.errors import SessionLost
from tandem.link.results import StepResult

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class StepUnderWay(Protocol):
    """A step that a runner was given, until its result is applied."""

    @property
    def may_be_taken(self) -> bool:
        """False while `result` would wait and the end of the step will be told anyway."""

    def result(self) -> StepResult:
        """Wait for the result, and return it at each call; raises the error of a failed step."""

    def drop(self) -> None:
        """Let go of the step: cancel it if it has not begun, and wait for it if it is launched."""


class Computing:
    """A step that a thread computes, or that is computed already."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    @property
    def may_be_taken(self) -> bool:
        """True once the step is computed, or has failed."""
        return self._future.done()

    def result(self) -> StepResult:
        """See `StepUnderWay.result`."""
        return self._future.result()

    def drop(self) -> None:
        """See `StepUnderWay.drop`."""
        self._future.cancel()


class Launched:
    """A step that a runner has begun."""

    may_be_taken = True
    """A launched step does not tell its end, so that `result` has to wait for it."""

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
        self._wait()
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def drop(self) -> None:
        """See `StepUnderWay.drop`: what other stages send for the step must be received."""
        self._wait()
        if isinstance(self._ended, Exception):
            _log.warning("dropped_step_failed", error=repr(self._ended))

    def _wait(self) -> None:
        collect, self._collect = self._collect, None
        if collect is None:
            return
        try:
            self._ended = collect()
        except Exception as error:  # noqa: BLE001  # raised by `result`, or logged by `drop`
            self._ended = error
