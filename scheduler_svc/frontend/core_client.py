"""Frontend's end of the pipe to the core: sends requests and queries, hands output to streams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog
import zmq

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.identity.identity import with_limits
from scheduler_svc.frontend.stream.inbox import Received, StreamInbox
from scheduler_svc.frontend.stream.open_streams import OpenStreams
from scheduler_svc.frontend.stream.shared_write import ItemBell
from scheduler_svc.frontend.text.served_model import ServedModel
from scheduler_svc.ipc.messages import (
    Accepted,
    Availability,
    CoreMessage,
    EndStream,
    FrontendMessage,
    Hello,
    Model,
    Query,
    Refused,
    Reply,
    StepSpan,
    Submit,
    Update,
    decode_from_core,
    encode,
)
from scheduler_svc.ipc.sockets import AsyncSocket
from scheduler_svc.process.frontend_settings import FrontendSettings
from tandem.errors import CoreTimeout, Draining, TandemError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

FRAMES_PER_TURN = 64
"""Most further messages of the core that are taken together before streams can go on."""
SEND_S = 50e-6
"""Approximate seconds that sending one message to a client takes."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.008
"""Bounds, in seconds, of the pause between reads of the core's messages; a shorter one is 0."""
SWEEP_INTERVAL_S = 0.5
PING_INTERVAL_S = 2.0
LATE_AFTER_S = 6.0
"""Age of the core's last message, in seconds, at which it is late: it owes three answers then."""


class CoreClient:
    """
    Client of the core. Owned by the event loop.

    The reader never waits for a stream. Messages arrive only while `run` is running; when it ends
    the core is gone.

    Attributes:
        num_turns: Counter that grows as long as the event loop runs; read by the watch thread.
        streams: Streams that have a client now; they get what the core sends for them.
        on_step: Is called with each step whose span is to be made here.
    """

    def __init__(
        self, settings: FrontendSettings, socket: AsyncSocket, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._socket = socket
        self._clock = clock
        self._query_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._sends: set[asyncio.Future[object]] = set()
        self._listeners: list[Callable[[], None]] = []
        self._last_message_s = clock()
        self._is_alive, self._is_late = True, False
        self._gone: TandemError | None = None
        self.num_turns = 0
        self.streams = OpenStreams(settings, clock)
        self.on_step: Callable[[StepSpan], None] = lambda _: None
        self.served = ServedModel()
        self.availability = Availability(executor_attached=False, ready=False, draining=False)

    @property
    def refusal(self) -> TandemError | None:
        """Error that every new request gets now; None while they are taken."""
        if self._gone is None and self.availability.draining:
            return Draining("the service is draining and takes no new request: try another replica")
        return self._gone

    def is_alive(self) -> bool:
        """
        Return True if the core sent a message within `core_timeout_s`; it answers every ping.

        The sweep alone decides that, since it knows of the time in which this process stood still.
        """
        return self._is_alive

    def is_late(self) -> bool:
        """Return True if the core sent nothing for `LATE_AFTER_S`."""
        return self._is_late

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever model, availability or liveness may have changed."""
        self._listeners.append(listener)

    async def run(self, hello: Hello) -> None:
        """
        Send the Hello of this frontend, then serve the pipe until cancelled.

        Raises:
            msgspec.ValidationError: The core's messages are of another version.
        """
        async with asyncio.TaskGroup() as tasks:
            self._send(hello)
            tasks.create_task(self._read())
            tasks.create_task(self._sweep())

    @contextmanager
    def submit(
        self,
        make_submit: Callable[[int], Submit],
        *,
        before: Sequence[Received] = (Received(),),
        with_logprobs: bool = False,
        bell: ItemBell | None = None,
        with_scores: bool = False,
    ) -> Iterator[StreamInbox]:
        """
        Submit a request to the core; leaving the block before the request ends cancels it there.

        Args:
            make_submit: Makes the request, given the stream number of its choice 0; the other
                choices have the numbers that follow.
            before: Output that the client has already, one per choice.
            with_logprobs: The request asks for log probabilities: a token is delivered only
                together with its own.
            bell: Is rung at news, on a stream that many requests share; None for one of its own.
            with_scores: The request asks for log probabilities of its prompt: its output is
                delivered after them.

        Raises:
            HandedOver: The core is gone.
            Draining: The service admits no new request.
            InternalError: All stream numbers were used.
        """
        if (refusal := self.refusal) is not None:
            raise refusal
        opened = self.streams.opened(
            before, with_logprobs=with_logprobs, with_scores=with_scores, bell=bell
        )
        with opened as inbox:
            try:
                self._send(with_limits(make_submit(inbox.choices[0].stream_id)))
                yield inbox
            finally:
                for choice in inbox.choices:
                    if not choice.is_over:
                        self.end(
                            choice.stream_id, reason=FinishReason.CANCELLED, num_output_tokens=None
                        )

    def end(self, stream_id: int, *, reason: int, num_output_tokens: int | None) -> None:
        """Ask the core to end a choice; `reason` is a FinishReason number."""
        self._send(
            EndStream(stream_id=stream_id, reason=reason, num_output_tokens=num_output_tokens)
        )

    def tell(self, kind: str) -> None:
        """Send the core a query of a kind without argument whose answer is not awaited."""
        self._send(Query(query_id=0, kind=kind, argument=b"{}"))

    async def query(self, kind: str, argument: bytes = b"{}", *, grace_s: float = 0.0) -> bytes:
        """
        Query the core and return the answer; see scheduler_svc.ipc.snapshot for kinds, arguments
        and answers.

        Args:
            kind: Kind of the query.
            argument: The argument as JSON.
            grace_s: Seconds that the core was asked to wait before it answers.

        Raises:
            HandedOver: The core is gone.
            CoreTimeout: The core did not answer in time.
            TandemError: The core answered with this error.
        """
        if self._gone is not None:
            raise self._gone
        timeout_s = grace_s + self._settings.query_timeout_s
        query_id = next(self._query_ids)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[query_id] = reply
        try:
            self._send(Query(query_id=query_id, kind=kind, argument=argument))
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError:
            raise CoreTimeout(
                f"the scheduler core did not answer {kind!r} within {timeout_s:g} s"
            ) from None
        finally:
            del self._replies[query_id]
        if answer.error is not None:
            raise answer.error.as_error()
        return answer.result

    def lose(self, error: TandemError) -> None:
        """
        End every query, and every stream that is not complete, with `error`, as the core is gone;
        refuse new ones with it.
        """
        self._gone = error
        self.streams.lose(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def _send(self, message: FrontendMessage) -> None:
        # The socket keeps the order and its own backlog: no task needs to wait for the pipe.
        sending = self._socket.send(encode(message))
        if not sending.done():
            self._sends.add(sending)
            sending.add_done_callback(self._sends.discard)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            self._last_message_s = self._clock()
            self._dispatch(decode_from_core(frame))
            # Messages that are here already are taken together, so that a frontend that lags can
            # catch up; but only so many, or streams would never get to write their output.
            for _ in range(FRAMES_PER_TURN):
                try:
                    frame = await self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._dispatch(decode_from_core(frame))
            self.streams.deliver_run()
            # Until these streams have sent their output they need no more, and the output of
            # several steps together costs little more than that of one.
            pause_s = min(MAX_PAUSE_S, self.streams.take_num_fed() * SEND_S)
            await asyncio.sleep(pause_s if pause_s > MIN_PAUSE_S else 0)

    def _dispatch(self, message: CoreMessage) -> None:
        match message:
            case Update():
                self.streams.apply(message)
            case Accepted() | Refused():
                self.streams.answer(message)
            case Reply():
                reply = self._replies.get(message.query_id)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case Availability():
                self.availability = message
                self.served.refusal = message.refusal
                self._notify()
            case StepSpan():
                self.on_step(message)
            case Model():
                self.served.load(message, self._notify)
                self._notify()

    async def _sweep(self) -> None:
        next_ping_s = 0.0
        now_s = self._clock()
        while True:
            self.num_turns += 1
            expected_s = now_s + SWEEP_INTERVAL_S
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now_s = self._clock()
            late_s = now_s - expected_s
            if late_s > SWEEP_INTERVAL_S:
                # Time in which this process stood still counts for no timeout.
                self._last_message_s = min(now_s, self._last_message_s + late_s)
                self.streams.forgive(late_s)
            self.streams.sweep(now_s)
            if now_s >= next_ping_s:
                next_ping_s = now_s + PING_INTERVAL_S
                self.tell("stats")
            silent_s = now_s - self._last_message_s
            state = silent_s < self._settings.core_timeout_s, silent_s >= LATE_AFTER_S
            if state != (self._is_alive, self._is_late):
                self._is_alive, self._is_late = state
                _log.warning("core_liveness_changed", alive=self._is_alive, late=self._is_late)
                self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        """Close the socket; no method may be called afterwards."""
        self._socket.close()
