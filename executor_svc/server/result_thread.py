"""The thread that collects results from the device, encodes and sends them beside the next step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import structlog

from executor_svc.server.loaded import DEPTH
from executor_svc.server.progress import Progress
from executor_svc.server.step_link import QueuedStep, StepLink
from tandem.link.codec.wire import encode_response
from tandem.link.commands import Step
from tandem.link.results import StepResult, StepTimings

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

_Collect = Callable[[], StepResult]


class ResultThread(threading.Thread):
    """
    The thread that collects results in the order of launches. Its methods other than `run` are
    called by the runner thread only, which so never encodes, and waits for the device only to make
    room.
    """

    def __init__(
        self,
        link: StepLink,
        progress: Progress,
        *,
        depth: int = DEPTH,
        fail: Callable[[Step, Exception], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        """
        Args:
            link: Receives the results.
            progress: Learns how long steps take.
            depth: Most steps launched and not yet completed.
            fail: Called on this thread for a step if its result could not be collected.
            on_broken: Called on this thread when any other error ends it.
        """
        super().__init__(name="results", daemon=True)
        self._link = link
        self._progress = progress
        self._depth = depth
        self._fail = fail
        self._on_broken = on_broken
        self._launched: queue.SimpleQueue[tuple[QueuedStep, _Collect] | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Room for launches, one entry for each step that may be launched."""
        self._failed_epoch = 0
        for _ in range(depth):
            self._room.put(None)

    def make_room(self, session_epoch: int) -> bool:
        """
        Wait until another step of the session may be launched. The caller then calls `put`, `drain`
        or `end`.

        Returns:
            False if an earlier step of the session has failed; then none of these calls follows.
        """
        self._room.get()
        if session_epoch == self._failed_epoch:
            self._room.put(None)
            return False
        return True

    def put(self, job: QueuedStep, collect: _Collect) -> None:
        """Take a launched step over."""
        self._launched.put((job, collect))

    def drain(self, *, held: int = 0) -> None:
        """Wait until all launched steps are completed; the caller holds `held` entries of room."""
        for _ in range(self._depth - held):
            self._room.get()
        for _ in range(self._depth):
            self._room.put(None)

    def end(self) -> None:
        """Complete the launched steps, then end the thread."""
        self._launched.put(None)
        self.join()

    def run(self) -> None:
        """Work until `end`."""
        try:
            while (launched := self._launched.get()) is not None:
                job, collect = launched
                if job.step.session_epoch != self._failed_epoch:
                    self._complete(job, collect)
                self._room.put(None)
        except Exception as error:  # noqa: BLE001  # outermost frame of the thread: the process ends
            self._on_broken(error)
        finally:
            for _ in range(2 * self._depth):  # the runner must not wait for a thread that has ended
                self._room.put(None)

    def _complete(self, job: QueuedStep, collect: _Collect) -> None:
        try:
            result = collect()
        except Exception as error:  # noqa: BLE001  # any failure of a step is reported, typed
            self._failed_epoch = job.step.session_epoch
            self._fail(job.step, error)
            return
        ended_ns = time.monotonic_ns()
        timings, step_ns = result.timings, result.timings.total_ns
        result.timings = StepTimings(
            queued_ns=max(0, ended_ns - step_ns - job.received_ns),
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            total_ns=ended_ns - job.received_ns,
        )
        self._link.complete(job.step, encode_response(result))
        _log.debug(
            "step_done",
            step_id=result.step_id,
            session_epoch=job.step.session_epoch,
            rows_sampled=len(result.slot),
            graph_tokens=result.graph,
            step_ms=round(step_ns / 1e6, 3),
        )
        self._progress.learn(job.step.command, step_ns / 1e9)
