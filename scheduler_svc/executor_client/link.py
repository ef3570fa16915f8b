"""
The threads that talk to executors: open a session, carry its step stream.

One thread does what the core tells it through `connect`, `seek` and `attach`, and reports through
`take_events`, waking the core's poll. It decides nothing about steps: the session's state belongs
to whoever turns the core (`executor_session`), who also begins to send them; for a step's result
that is this thread itself. Each stream has a connection of its own: one that died unnoticed takes
no later stream with it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from scheduler_svc.executor_client.channel import open_channel
from scheduler_svc.executor_client.connection import ExecutorConnector, ModelInUse
from scheduler_svc.executor_client.link_events import LinkEvent, StreamBroken, StreamMessage
from scheduler_svc.executor_client.step_call import CallEnded, StepCall
from tandem.errors import CorruptMessage, SessionLost, TandemError
from tandem.link.batch import StepResult
from tandem.link.wire import decode_response
from tandem.status import PeerUnavailable, from_rpc_error

STOP_DEADLINE_S = 2.0
RELEASE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Connect:
    delay_s: float
    elsewhere: bool


@dataclass(frozen=True, slots=True)
class _Seek:
    may_move: bool
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stream:
    number: int
    delay_s: float
    early: list[bytes]
    """What is to be sent once the call begins."""


class ExecutorLink:
    """Connection to the executor in use. Public methods are for the core loop."""

    def __init__(self, connector: ExecutorConnector, *, wake: Callable[[], None]) -> None:
        """
        Args:
            connector: Opens sessions; this link's from now on.
            wake: Called after every event, until `turn_with` after those that are no results.
        """
        self._connector = connector
        self._wake = wake
        self._turn = wake
        self._commands: queue.SimpleQueue[_Connect | _Seek | _Stream | None] = queue.SimpleQueue()
        self._events: deque[LinkEvent] = deque()
        self._stopping = threading.Event()
        self._is_releasing = False
        self._lock = threading.Lock()
        self._call: StepCall | None = None
        """The newest stream's, while it lasts."""
        self._last_broken = 0
        """Streams up to this number are to end; all these are guarded by `_lock`."""
        self._stream = _Stream(0, 0.0, [])
        self._thread = threading.Thread(target=self._run, name="executor-link", daemon=True)

    def start(self) -> None:
        """Start the thread; it waits for `connect`."""
        self._thread.start()

    def turn_with(self, turn: Callable[[], None]) -> None:
        """
        Call `turn` after every result, on the thread that read it; it does not raise. Like `wake`
        it sees to it that the result is taken, only sooner.
        """
        self._turn = turn

    def connect(self, delay_s: float = 0.0, *, elsewhere: bool = False) -> None:
        """
        Open a session, however many attempts it takes; ends with a SessionOpened. With `elsewhere`
        another address than the last session's is tried first, where there is one.
        """
        self._commands.put(_Connect(delay_s, elsewhere))

    def seek(self, *, may_move: bool) -> None:
        """
        Ask once at all addresses but the newest session's. Where its executor answers too streams
        are opened from now on, which a PathFound tells; if nowhere and `may_move`, a session is
        opened with another executor that can be used.
        """
        self._commands.put(_Seek(may_move))

    def require(self, model: ModelInUse | None) -> None:
        """Open sessions only with executors of this model from now on; None for any."""
        self._connector.require(model)

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        """Open a step stream that starts with this message; gives the stream's number."""
        self.break_stream()
        with self._lock:
            self._stream = _Stream(self._stream.number + 1, delay_s, [raw_attach])
        self._commands.put(self._stream)
        return self._stream.number

    def send(self, raw_step: bytes) -> None:
        """Queue a message on the newest stream; one that has ended drops it."""
        with self._lock:
            call = self._call
            if call is None:
                self._stream.early.append(raw_step)
        if call is not None:
            call.outgoing.put(raw_step)

    def break_stream(self) -> None:
        """End the newest stream, if it has not ended already."""
        with self._lock:
            self._last_broken = self._stream.number
            if self._call is not None:
                self._call.cancel()
                self._call = None

    def take_events(self) -> Iterator[LinkEvent]:
        """What happened until this call, in order; what happens meanwhile waits for the next."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def release(self) -> None:
        """
        End everything, and let another scheduler have the executor before our lease has passed.
        Does not wait for it; nothing but `stop` may follow.
        """
        if not self._stopping.is_set():
            self._is_releasing = True
            self._end()

    def stop(self, *, release: bool) -> None:
        """End everything; with `release` another scheduler need not wait for our whole lease."""
        if release:
            self.release()
        elif not self._stopping.is_set():
            self._end()
        self._thread.join(timeout=STOP_DEADLINE_S + RELEASE_DEADLINE_S * self._is_releasing)

    def _end(self) -> None:
        self._stopping.set()
        self.break_stream()
        self._commands.put(None)

    def _post(self, event: LinkEvent) -> None:
        self._events.append(event)
        self._wake()

    def _run(self) -> None:
        self._serve()
        if self._is_releasing:
            self._connector.shorten_lease()

    def _serve(self) -> None:
        while (command := self._commands.get()) is not None:
            if self._stopping.wait(command.delay_s):
                return
            match command:
                case _Connect(elsewhere=elsewhere):
                    self._connector.connect(self._post, self._stopping, elsewhere=elsewhere)
                case _Seek(may_move=may_move):
                    self._connector.seek(self._post, may_move=may_move)
                case _Stream():
                    with open_channel(self._connector.address) as channel:
                        self._carry(channel, command)

    def _carry(self, channel: grpc.Channel, stream: _Stream) -> None:
        """Run one step stream to its end."""
        call = StepCall(channel)
        with self._lock:
            if stream.number <= self._last_broken:
                call.cancel()
            else:
                self._call = call
                for raw in stream.early:
                    call.outgoing.put(raw)
        error: TandemError = PeerUnavailable("the executor ended the step stream")
        refused: TandemError | None = None
        try:
            for raw in call.messages():
                if refused is None:
                    refused = self._take(raw, stream)
                    if refused is not None:
                        call.cancel()
        except CallEnded as ended:
            error = from_rpc_error(ended)
        with self._lock:
            if self._call is call:
                self._call = None
        self._post(StreamBroken(stream=stream.number, error=refused or error))

    def _take(self, raw: bytes, stream: _Stream) -> TandemError | None:
        """Report a message, or say why the stream cannot go on."""
        try:
            message = decode_response(raw)
        except (CorruptMessage, SessionLost) as error:
            return error
        self._events.append(StreamMessage(stream=stream.number, message=message))
        if isinstance(message, StepResult):
            self._turn()
        else:
            self._wake()
        return None
