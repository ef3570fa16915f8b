"""
The thread that talks to executors: it opens sessions and carries their step streams.

The thread does what the core tells it through `connect`, `seek` and `attach`. It reports through
`take_events` and wakes the core's poll. It decides nothing about steps: the session's state
(`session`) belongs to the thread that makes the core's turn, and that thread also begins to send
steps. For a step's result, this thread makes the turn itself. Each stream has its own connection,
so that a connection that died unnoticed breaks no later stream.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from scheduler_svc.executor_client.connection import ExecutorConnector, ModelInUse
from scheduler_svc.executor_client.link_events import LinkEvent, StreamBroken, StreamMessage
from scheduler_svc.executor_client.step_call import CallEnded, StepCall
from tandem.errors import CorruptMessage, SessionLost, TandemError
from tandem.link.codec.wire import decode_response
from tandem.link.results import StepResult
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
    """Messages to send once the call begins."""


class ExecutorLink:
    """Link to the executor in use. Public methods are for the core loop."""

    def __init__(self, connector: ExecutorConnector, *, wake: Callable[[], None]) -> None:
        """
        Args:
            connector: Opens sessions; owned by this link from now on.
            wake: Called after every event; after `turn_with`, only after events that are not step
                results.
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
        """Call of the newest stream, while it lasts. Guarded by `_lock`, as the next two are."""
        self._last_broken = 0
        """Number of the newest stream that must end, as must all before it."""
        self._stream = _Stream(0, 0.0, [])
        self._thread = threading.Thread(target=self._run, name="executor-link", daemon=True)

    def start(self) -> None:
        """Start the thread, which waits for the first command."""
        self._thread.start()

    def turn_with(self, turn: Callable[[], None]) -> None:
        """
        Call `turn` after every step result, on the thread that read it. It must not raise, and it
        takes the result, as the turn after a `wake` would, but sooner.
        """
        self._turn = turn

    def connect(self, delay_s: float = 0.0, *, elsewhere: bool = False) -> None:
        """
        Open a session, with as many attempts as it takes; a SessionOpened reports it. With
        `elsewhere`, the address of the last session is tried last instead of first.
        """
        self._commands.put(_Connect(delay_s, elsewhere))

    def seek(self, *, may_move: bool) -> None:
        """
        Look for the newest session's executor at all other addresses, once.

        If it answers at one, later streams are opened there, and a PathFound reports it. If it does
        not and `may_move` is set, a session is opened with another executor that can be used.
        """
        self._commands.put(_Seek(may_move))

    def require(self, model: ModelInUse | None) -> None:
        """Open sessions only with executors of this model from now on; None for any."""
        self._connector.require(model)

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        """Open a step stream that starts with this message; return the stream's number."""
        self.break_stream()
        with self._lock:
            self._stream = _Stream(self._stream.number + 1, delay_s, [raw_attach])
        self._commands.put(self._stream)
        return self._stream.number

    def send(self, raw_step: bytes) -> None:
        """Queue a message on the newest stream; a stream that has ended drops it."""
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

    @property
    def has_events(self) -> bool:
        """True while there are events to take."""
        return bool(self._events)

    def take_events(self) -> Iterator[LinkEvent]:
        """Yield the events up to this call, in order; later ones wait for the next call."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def release(self) -> None:
        """
        End everything, and shorten this scheduler's lease so that another one can soon have the
        executor. The call does not wait; only `stop` may follow it.
        """
        if not self._stopping.is_set():
            self._is_releasing = True
            self._end()

    def stop(self, *, release: bool) -> None:
        """End everything, with `release` as by `release()`; wait some seconds for the thread."""
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
        self._connector.give_up()

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
                    connector = self._connector
                    with connector.access.open(connector.address) as channel:
                        self._carry(channel, command)

    def _carry(self, channel: grpc.Channel, stream: _Stream) -> None:
        """Run one step stream to its end."""
        call = StepCall(channel, self._connector.access.metadata())
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
        """Report a message; return an error if the stream cannot go on."""
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
