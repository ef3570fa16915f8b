"""A rank other than 0: it applies what rank 0 applies, in the same order, and serves no calls."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from executor_svc.ranks.channel import Channel, ChannelClosed, Frame, Kind
from executor_svc.ranks.failures import encoded_failure
from executor_svc.ranks.watch import Watch, end_process
from executor_svc.server.loaded import Engine
from executor_svc.server.runner_thread import launch
from tandem.errors import InternalError, SessionLost, TandemError
from tandem.link.batch import Batch
from tandem.link.codec.wire import decode_request
from tandem.link.commands import Step
from tandem.link.results import StepResult

AGREE_S = 5.0
"""Seconds in which rank 0 must find, as this rank did, that a step contradicts the slots."""
REPORTED_S = 10.0
"""Seconds in which rank 0 ends after this rank has reported that it cannot go on."""
SHUTDOWN_S = 2.0
"""Seconds in which a rank ends after rank 0 has shut down."""

_log = structlog.get_logger(__name__)


class Follower:
    """
    The loop of one rank, on the thread that loads its share of the model.

    It ends with rank 0: by SHUTDOWN in good order, otherwise the watch thread ends the process.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        on_silent: Callable[[TandemError], None] = lambda _: None,
        end: Callable[[TandemError], None] = end_process,
    ) -> None:
        """
        Args:
            channel: Connection to rank 0.
            on_silent: Called with the error before the process ends because rank 0 is silent.
            end: Ends the process for an error.
        """
        self._channel = channel
        self._end = end
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._watch = Watch([channel], self._take, on_silent=on_silent, end=end)
        self._launched: deque[Callable[[], StepResult]] = deque()
        self._lost: SessionLost | None = None
        late = InternalError(f"rank 0 ended, and a step of this rank did not in {SHUTDOWN_S:g} s")
        self._late = threading.Timer(SHUTDOWN_S, end, [late])
        self._late.daemon = True
        """Ends the process where a step waits for a rank that has shut down."""

    def start(self) -> None:
        """Begin to watch rank 0."""
        self._watch.start()

    def run(self, load: Callable[[], Engine]) -> None:
        """Load, then follow rank 0 until it shuts down; an error is reported to it first."""
        try:
            self._follow(load())
            self._late.cancel()
        except Exception as error:  # noqa: BLE001  # outermost frame: rank 0 ends the executor
            self._fail(error)

    def _take(self, _rank: int, frame: Frame) -> None:
        if frame.kind is Kind.SHUTDOWN:
            self._watch.close()
            if self._late.ident is None:
                self._late.start()
        self._inbox.put(frame)

    def _follow(self, engine: Engine) -> None:
        self._channel.send(Frame(Kind.READY))
        while (frame := self._next()).kind is not Kind.SHUTDOWN:
            match frame.kind:
                case Kind.READY:
                    continue
                case Kind.RESET:
                    self._drain()
                    self._lost = None
                    engine.runner.reset()
                    self._channel.send(Frame(Kind.DONE, seq=frame.seq))
                case Kind.STEP:
                    self._step(engine, frame)
                case Kind.LOST:
                    if self._lost is None:
                        raise InternalError("rank 0 refused a step that this rank took")
                case Kind.CHECK:
                    _compare(engine, int.from_bytes(frame.payload, "little"))
                    engine.compare_ranks()
                case _:
                    raise InternalError(f"rank 0 sent a {frame.kind.name}")

    def _next(self) -> Frame:
        return self._inbox.get()

    def _step(self, engine: Engine, frame: Frame) -> None:
        step = decode_request(frame.payload)
        if not isinstance(step, Step):
            raise InternalError("rank 0 passed on what is no step")
        if self._lost is not None:
            raise InternalError(f"rank 0 went on after: {self._lost.message}")
        try:
            self._launched.append(launch(engine.runner, step))
        except SessionLost as error:
            self._drain()
            self._lost = error
            self._await_agreement(error)
            return
        while len(self._launched) >= engine.depth:
            self._launched.popleft()()
        if not isinstance(step.command, Batch):
            self._drain()
            self._channel.send(Frame(Kind.DONE, seq=frame.seq))

    def _await_agreement(self, error: SessionLost) -> None:
        """Wait for rank 0 to lose the session too: where it took the step, it waits for us."""
        try:
            frame = self._inbox.get(timeout=AGREE_S)
        except queue.Empty:
            frame = None
        if frame is None or frame.kind is not Kind.LOST:
            raise InternalError(f"this rank refused a step that rank 0 took: {error.message}")

    def _drain(self) -> None:
        while self._launched:
            self._launched.popleft()()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TandemError):
            _log.error("rank_broken", exc_info=error)
        try:
            self._channel.send(Frame(Kind.FAILED, payload=encoded_failure(error)))
            time.sleep(REPORTED_S)  # the watch thread ends the process when rank 0 has ended
        except ChannelClosed:
            pass
        self._end(InternalError("this rank failed, and rank 0 did not end"))


def _compare(engine: Engine, checksum: int) -> None:
    own = engine.checksum()
    if own != checksum:
        raise InternalError(
            f"its tokens differ from those of rank 0 on the device: checksum {own:#x}, there "
            f"{checksum:#x}"
        )
