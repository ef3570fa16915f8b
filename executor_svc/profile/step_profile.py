"""
One recording, shared by the thread that runs steps and the thread that serves the call.

    waiting ── begin ──▶ recording ── enough steps, time is up or call cancelled ──▶ over
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from executor_svc.profile.recorder import Recorder
from tandem.profile import ProfileOptions

Outcome = TypeVar("Outcome")

_log = structlog.get_logger(__name__)


class StepProfile:
    """
    A recording and its count of steps. Only the runner thread calls `begin`, `run_step` and `end`.

    Attributes:
        num_steps: Number of steps recorded so far.
        is_recorded: Set once the recording has ended, for any reason.
        error: The error of a recorder that failed; None otherwise.
    """

    def __init__(
        self,
        recorder: Recorder,
        options: ProfileOptions,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            recorder: Recorder that has not been started.
            options: Number of steps and seconds after which the recording ends.
            clock_s: Clock of monotonic time in seconds.
        """
        self._recorder = recorder
        self._options = options
        self._clock_s = clock_s
        self._began_s: float | None = None
        self.num_steps = 0
        self.is_recorded = threading.Event()
        self.error: Exception | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since `begin`; 0 before."""
        return 0.0 if self._began_s is None else self._clock_s() - self._began_s

    @property
    def is_due(self) -> bool:
        """True once enough steps are recorded or the time is up."""
        return (
            self.num_steps >= self._options.num_steps or self.elapsed_s >= self._options.duration_s
        )

    def begin(self) -> None:
        """Begin to record with the next step, unless the recording has been ended."""
        if self.is_recorded.is_set():
            return
        try:
            self._recorder.start()
        except Exception as error:  # noqa: BLE001  # whatever a profiler does wrong, steps go on
            self._fail(error)
        else:
            self._began_s = self._clock_s()

    def run_step(self, step: Callable[[], Outcome]) -> Outcome:
        """Run one step, recorded unless the recording is over; its errors pass through."""
        if self.is_due:
            self.end()
        if self.is_recorded.is_set():
            return step()
        with self._recorder.mark():
            outcome = step()
        self.num_steps += 1
        return outcome

    def end(self) -> None:
        """Stop recording; a second call does nothing."""
        if self.is_recorded.is_set():
            return
        try:
            if self._began_s is not None:
                self._recorder.stop()
        except Exception as error:  # noqa: BLE001  # whatever a profiler does wrong, steps go on
            self._fail(error)
        self.is_recorded.set()

    def _fail(self, error: Exception) -> None:
        _log.error("profiler_failed", exc_info=error)
        self.error = error
        self.is_recorded.set()
