"""
The link between server threads, heartbeat thread, runner thread and result thread: sessions, queued
steps, results.

Every method takes the one lock for a moment; no thread computes or does I/O while it holds it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from executor_svc.server.loaded import HEARTBEAT_INTERVAL_S
from executor_svc.server.progress import Progress
from executor_svc.server.step_stream import StepStream
from tandem.errors import SessionLost, StreamReplaced, TandemError
from tandem.link.codec.wire import encode_response
from tandem.link.commands import Step
from tandem.link.executor_end import ExecutorEnd
from tandem.link.session import Attach, Heartbeat, LossCause, SchedulerId

LONGEST_PAUSE_S = 1.0
"""Delay of a heartbeat above which the whole process or machine must have been stopped."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A received step and its bytes, queued for the runner; `received_ns` is monotonic time."""

    step: Step
    raw: bytes
    received_ns: int


@dataclass(frozen=True, slots=True)
class SlotReset:
    """The reset of all slots for a new session; the runner sets `done` after it."""

    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Errand:
    """A function for the runner thread to call between two steps; it must not raise."""

    run: Callable[[], None]


class StepLink:
    """The lock around the protocol's state machine, and the queue of the runner thread."""

    def __init__(
        self,
        boot_id: str,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            boot_id: Id of this process.
            clock_ns: Clock of monotonic time in nanoseconds.
            progress: Learns which step is running and how long steps take.
        """
        self._end = ExecutorEnd(boot_id)
        self._clock_ns = clock_ns
        self._progress = progress or Progress()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[QueuedStep | SlotReset | Errand | None] = queue.SimpleQueue()
        """Jobs of the runner in order; None makes it check whether to stop."""
        self._launched: deque[QueuedStep] = deque()
        """Steps given to the runner and not yet completed; the oldest is running."""
        self._stream: StepStream | None = None
        self._stopped_by: TandemError | None = None
        self._last_reset: SlotReset | None = None
        self._beat_s = self._now_s()

    def give_credit(self, max_inflight_steps: int) -> None:
        """Let schedulers send so many steps ahead, as the loaded engine describes it."""
        with self._lock:
            self._end.give_credit(max_inflight_steps)

    def open_session(
        self, scheduler: SchedulerId, *, take_over: bool, lease_s: float
    ) -> tuple[int, threading.Event]:
        """
        Begin a session: steps still queued are dropped, an open stream ends.

        Returns:
            The epoch, and an event that is set once the running step has ended and all slots are
            reset; only then may the caller be answered.

        Raises:
            SessionHeld: Another scheduler's lease is live.
            TandemError: The executor is stopping; this is the reason.
        """
        reset = SlotReset()
        with self._lock:
            if self._stopped_by is not None:
                raise self._stopped_by
            epoch = self._end.open_session(scheduler, take_over, lease_s, self._now_s())
            self._end_stream(self._end.fenced())
            dropped = self._drop_steps()
            self._jobs.put(reset)
            self._last_reset = reset
        _log.info(
            "session_opened",
            session_epoch=epoch,
            scheduler=str(scheduler),
            take_over=take_over,
            lease_s=lease_s,
            dropped_steps=dropped,
        )
        return epoch, reset.done

    def grant(self, session_epoch: int) -> None:
        """Note that the call that opened a session is answered now, unless a newer one was."""
        with self._lock:
            self._end.grant(session_epoch, self._now_s())

    @property
    def stopped_by(self) -> TandemError | None:
        """The error that stopped the executor; None while steps may begin."""
        return self._stopped_by

    @property
    def is_session_waiting(self) -> bool:
        """True while a new session waits for the running step to end."""
        reset = self._last_reset
        return reset is not None and not reset.done.is_set()

    def attach(self, attach: Attach, stream: StepStream) -> None:
        """
        Make `stream` the session's stream and send it the first answer and the results that the
        scheduler has not acknowledged.

        Raises:
            SessionLost: The session cannot go on.
            StreamReplaced: A newer stream is attached.
            TandemError: The executor is stopping; this is the reason.
        """
        with self._lock:
            if self._stopped_by is not None:
                raise self._stopped_by
            attached, owed = self._end.attach(attach, self._now_s())
            self._end_stream(
                StreamReplaced(f"stream {attach.attach_id} replaced this one in its session")
            )
            stream.session_epoch, stream.attach_id = attach.session_epoch, attach.attach_id
            self._stream = stream
            stream.put(encode_response(attached))
            for message in owed:
                stream.put(message)
        _log.info(
            "stream_attached",
            session_epoch=attach.session_epoch,
            attach_id=attach.attach_id,
            acked_step_id=attach.acked_step_id,
            results_sent_again=len(owed),
        )

    def receive(self, step: Step, raw: bytes, stream: StepStream) -> None:
        """
        Queue a step received on a stream, unless it was received before.

        Raises:
            SessionLost: The step breaks the protocol.
            StreamReplaced: A newer stream is attached.
        """
        with self._lock:
            if self._end.receive(step, raw, stream.attach_id, self._now_s()):
                self._jobs.put(QueuedStep(step, raw, self._clock_ns()))

    def detach(self, stream: StepStream) -> None:
        """Note that a stream is over; steps already received still run."""
        with self._lock:
            self._end.detach(stream.session_epoch, stream.attach_id)
            if self._stream is stream:
                self._stream = None

    def between_steps(self, errand: Callable[[], None]) -> None:
        """Let the runner thread call `errand` after the steps received so far."""
        with self._lock:  # so that `_drop_steps` is not putting jobs back meanwhile
            self._jobs.put(Errand(errand))

    def next_job(self) -> QueuedStep | SlotReset | Errand | None:
        """
        Wait for the runner's next job; None means stop.

        A step counts as running from here, or from the completion of those launched before it.
        """
        while True:
            job = self._jobs.get()
            with self._lock:
                if self._stopped_by is not None:
                    return None
                if isinstance(job, SlotReset | Errand):
                    return job
                if job is not None and self._is_due(job):
                    self._launched.append(job)
                    if len(self._launched) == 1:
                        self._start(job)
                    return job

    def complete(self, step: Step, encoded: bytes, *, failed: bool = False) -> None:
        """
        Keep the oldest launched step's outcome, and send it if its session's stream is attached. If
        the step failed, the steps launched after it are dropped and their outcomes ignored.
        """
        with self._lock:
            if not self._is_over(step):
                return
            if failed:
                self._launched.clear()
            is_wanted = self._end.complete(step.session_epoch, step.step_id, encoded, failed=failed)
            if is_wanted and self._stream is not None:
                self._stream.put(encoded)
            if self._launched:
                self._start(self._launched[0])

    @property
    def running(self) -> Step | None:
        """The oldest step that was launched and is not completed."""
        with self._lock:
            return self._launched[0].step if self._launched else None

    def lose(self, step: Step, error: SessionLost) -> None:
        """End the session of the one launched step: scheduler and executor no longer agree."""
        with self._lock:
            if not self._is_over(step):
                return
            if step.session_epoch == self._end.session_epoch:
                self._end.lose(error.message, LossCause.of(error.metadata), error.metadata)
                self._end_stream(error)

    def beat(self) -> Heartbeat:
        """
        Send a heartbeat, unless older messages still wait to be sent, and return it. It is called
        every `HEARTBEAT_INTERVAL_S`: a call that comes much later means that the whole process,
        the running step included, was stopped.
        """
        with self._lock:
            now_s = self._now_s()
            self._forgive_stop(now_s)
            heartbeat = self._end.heartbeat(now_s)
            if self._stream is not None and self._stream.is_idle:
                self._stream.put(encode_response(heartbeat))
        return heartbeat

    def stop(self, error: TandemError) -> None:
        """
        Start no further step, and refuse sessions and streams with the `error` of the first call.
        """
        with self._lock:
            self._stopped_by = self._stopped_by or error
        self._jobs.put(None)

    def end_streams(self) -> None:
        """End the open stream, after `stop` and the last result."""
        with self._lock:
            self._end_stream(self._stopped_by)

    def _forgive_stop(self, now_s: float) -> None:
        """Leave the time that the whole process was stopped out of the running step's age."""
        stopped_s = now_s - self._beat_s - HEARTBEAT_INTERVAL_S
        if stopped_s > LONGEST_PAUSE_S:
            self._end.was_stopped(stopped_s)
            self._progress.was_stopped(stopped_s)
        self._beat_s = now_s

    def _is_due(self, job: QueuedStep) -> bool:
        is_current = job.step.session_epoch == self._end.session_epoch
        return is_current and self._end.can_execute

    def _is_over(self, step: Step) -> bool:
        """Remove the oldest launched step; return False if another's failure dropped `step`."""
        if not self._launched or self._launched[0].step is not step:
            return False
        self._launched.popleft()
        self._progress.end()
        return True

    def _start(self, job: QueuedStep) -> None:
        """Watch a step that begins to compute, even if its session is over meanwhile."""
        now_s = self._now_s()
        if self._is_due(job):
            self._end.start(job.step.step_id, now_s)
        self._progress.start(job.step.command, now_s)

    def _drop_steps(self) -> int:
        """Drop the queued steps, keep other jobs, which threads wait for; return their number."""
        kept: list[SlotReset | Errand | None] = []
        num_dropped = 0
        while not self._jobs.empty():
            with contextlib.suppress(queue.Empty):  # the runner may take it first
                job = self._jobs.get_nowait()
                if isinstance(job, QueuedStep):
                    num_dropped += 1
                else:
                    kept.append(job)
        for job in kept:
            self._jobs.put(job)
        return num_dropped

    def _end_stream(self, error: TandemError | None) -> None:
        if self._stream is not None:
            self._stream.end(error)
            self._stream = None

    def _now_s(self) -> float:
        return self._clock_ns() / 1e9
