"""The Profile call: records steps for one caller at a time and streams progress and trace."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import structlog

from executor_svc.profile.recorder import Recorder
from executor_svc.profile.step_profile import StepProfile
from executor_svc.profile.trace_file import chunks
from tandem.common.v1.profile_pb2 import ProfileProgress, TraceChunk
from tandem.errors import InternalError, ProfileRunning, TandemError
from tandem.profile import ProfileOptions

Outcome = TypeVar("Outcome")

PROGRESS_INTERVAL_S = 0.5
_LOOK_INTERVAL_S = 0.05

_log = structlog.get_logger(__name__)


class Profiles:
    """
    Recordings of steps, one at a time, and their streams.

    Attributes:
        active: The recording that the runner thread adds steps to, None if there is none; only the
            runner thread writes it.
    """

    def __init__(
        self,
        between_steps: Callable[[Callable[[], None]], None],
        stopped_by: Callable[[], TandemError | None],
    ) -> None:
        """
        Args:
            between_steps: Makes the runner thread call a function between two steps.
            stopped_by: Returns the error that stopped the executor; None while steps may begin.
        """
        self._between_steps = between_steps
        self._stopped_by = stopped_by
        self._lock = threading.Lock()
        self._is_taken = False
        self.active: StepProfile | None = None

    def record(
        self,
        recorder: Recorder,
        options: ProfileOptions,
        is_wanted: Callable[[], bool],
    ) -> Iterator[ProfileProgress | TraceChunk]:
        """
        Record steps, then give their trace.

        Args:
            recorder: Recorder of this recording only.
            options: Number of steps and seconds after which the recording ends.
            is_wanted: Called often; once it returns False, no more messages are yielded.

        Raises:
            ProfileRunning: Another profile is being recorded.
            InvalidParameter: The trace is too large.
            InternalError: The profiler failed, or the trace could not be written.
            TandemError: The executor is stopping; this is the reason.
        """
        with self._lock:
            if self._is_taken:
                raise ProfileRunning(
                    "a profile is being recorded already: wait for its end, or cancel it"
                )
            self._is_taken = True
        profile = StepProfile(recorder, options)
        try:
            self._between_steps(lambda: self._begin(profile))
            yield from self._watch(profile, is_wanted)
            if is_wanted():
                yield from self._send(profile, recorder)
        finally:
            if profile.is_recorded.is_set():
                self._release()
            else:  # the caller left: no other profile may begin before the runner ends this one
                self._between_steps(lambda: self._end(profile, is_last=True))

    def run_step(self, step: Callable[[], Outcome]) -> Outcome:
        """Run a step on the runner thread, recorded if `active` is set; its errors pass through."""
        profile = self.active
        if profile is None:
            return step()
        try:
            return profile.run_step(step)
        finally:
            if profile.is_recorded.is_set():
                self.active = None

    def abandon(self) -> None:
        """Stop recording, on the runner thread, because no step follows."""
        if self.active is not None:
            self._end(self.active)

    def _begin(self, profile: StepProfile) -> None:
        profile.begin()
        self.active = None if profile.is_recorded.is_set() else profile

    def _end(self, profile: StepProfile, *, is_last: bool = False) -> None:
        profile.end()
        self.active = None
        if is_last:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._is_taken = False

    def _watch(
        self, profile: StepProfile, is_wanted: Callable[[], bool]
    ) -> Iterator[ProfileProgress]:
        """Yield progress until the recording is complete or no longer wanted."""
        next_report_s = 0.0
        is_ending = False
        while not profile.is_recorded.wait(_LOOK_INTERVAL_S) and is_wanted():
            self._check_running()
            if profile.is_due and not is_ending:
                # A busy runner ends the recording by itself; an idle one must be told.
                is_ending = True
                self._between_steps(lambda: self._end(profile))
            if profile.elapsed_s >= next_report_s:
                next_report_s = profile.elapsed_s + PROGRESS_INTERVAL_S
                yield _progress(profile)
        self._check_running()

    def _check_running(self) -> None:
        if (error := self._stopped_by()) is not None:
            raise error

    def _send(
        self, profile: StepProfile, recorder: Recorder
    ) -> Iterator[ProfileProgress | TraceChunk]:
        if profile.error is not None:
            raise InternalError(f"the profiler failed: {profile.error}; see the executor's log")
        _log.info("profile_recorded", steps=profile.num_steps)
        progress = _progress(profile)
        progress.is_recorded = True
        yield progress
        try:
            with tempfile.TemporaryDirectory(prefix="tandem-profile-") as folder:
                trace = Path(folder) / "trace.json"
                recorder.write(trace)
                yield from chunks(trace)
        except OSError as error:
            raise InternalError(
                f"the trace could not be written: {error}; make room in the executor's temporary "
                "folder, or choose another with TMPDIR"
            ) from error


def _progress(profile: StepProfile) -> ProfileProgress:
    return ProfileProgress(num_steps=profile.num_steps, elapsed_s=profile.elapsed_s)
