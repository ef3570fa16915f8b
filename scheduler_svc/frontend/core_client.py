"""The frontend's end of the pipe to the core: requests out, news to their streams, queries."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import structlog
import zmq

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream.inbox import ChoiceInbox, Received, StreamInbox
from scheduler_svc.frontend.stream.turns import Turns
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
    StreamLogprobs,
    Submit,
    Update,
    decode_from_core,
    encode,
)
from scheduler_svc.ipc.token_run import TokenRun
from scheduler_svc.process.frontend_settings import FrontendSettings
from tandem.errors import ERROR_BY_REASON, Draining, HandedOver, InternalError, TandemError
from tandem.link.logprobs import LogprobColumns

log = structlog.get_logger()

FRAMES_PER_TURN = 64
"""Messages of the core taken before streams get their turn."""
SEND_S = 50e-6
"""About what sending one message takes."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.008
"""Between looks at the core's messages; for fewer streams than fill the first there is none."""
SWEEP_INTERVAL_S = 0.5
PING_INTERVAL_S = 5.0
MAX_STREAM_ID = 2**32 - 1


class AsyncSocket(Protocol):
    """What is needed of a `zmq.asyncio.Socket`."""

    def send(self, data: bytes) -> asyncio.Future[object]:
        """Queue one message in order; done when it is in the pipe."""

    async def recv(self, flags: int = 0) -> bytes:
        """Wait for one message; with NOBLOCK raise zmq.Again where there is none."""

    def close(self) -> None:
        """Close without waiting."""


class CoreClient:
    """
    Owned by the event loop. The reader only sorts messages into inboxes and never waits for anyone.

    `run` must be running for anything to arrive; when it ends the core is gone.
    """

    def __init__(
        self, settings: FrontendSettings, socket: AsyncSocket, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._socket = socket
        self._clock = clock
        self._inboxes: dict[int, StreamInbox] = {}
        """By the number of choice 0."""
        self._choices: dict[int, ChoiceInbox] = {}
        """By stream number."""
        self._turns = Turns()
        self._next_stream_id = 1
        self._query_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._sends: set[asyncio.Future[object]] = set()
        self._listeners: list[Callable[[], None]] = []
        self._run: TokenRun | None = None
        """Tokens of the last updates."""
        self._num_fed = 0
        """Streams that got tokens since the last pause."""
        self._last_message_s = clock()
        self._gone: TandemError | None = None
        self.num_turns = 0
        """Grows as long as the event loop turns; read by whoever watches it."""
        self.served = ServedModel()
        self.availability = Availability(executor_attached=False, ready=False, draining=False)

    @property
    def num_streams(self) -> int:
        """Requests that have a client now."""
        return len(self._inboxes)

    def is_alive(self) -> bool:
        """Whether the core said anything lately; it is asked often enough for that."""
        return self._clock() - self._last_message_s < self._settings.core_timeout_s

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever model, availability or liveness may have changed."""
        self._listeners.append(listener)

    async def run(self, hello: Hello) -> None:
        """
        Introduce this frontend, then serve the pipe until cancelled.

        Raises:
            msgspec.ValidationError: The core speaks another version.
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
    ) -> Iterator[StreamInbox]:
        """
        Hand a request to the core; leaving the block before its end cancels it there.

        Args:
            make_submit: The request, given the number that its choice 0 will have; the others have
                the numbers that follow.
            before: What the client has already, one per choice.
            with_logprobs: It asks for log probabilities: no token is news without its own.

        Raises:
            HandedOver: The core is gone.
            Draining: The service takes no new request.
        """
        if self._gone is not None:
            raise self._gone
        if self.availability.draining:
            raise Draining("the service is draining and takes no new request: try another replica")
        stream_id = self._next_stream_id
        self._next_stream_id += len(before)
        if self._next_stream_id > MAX_STREAM_ID:
            raise InternalError("this frontend ran out of stream numbers: restart it")
        inbox = StreamInbox(
            stream_id,
            before=before,
            with_logprobs=with_logprobs,
            max_pending_bytes=self._settings.max_pending_bytes,
            now_s=self._clock(),
            turns=self._turns,
        )
        self._inboxes[stream_id] = inbox
        self._choices.update({choice.stream_id: choice for choice in inbox.choices})
        try:
            self._send(make_submit(stream_id))
            yield inbox
        finally:
            del self._inboxes[stream_id]
            for choice in inbox.choices:
                del self._choices[choice.stream_id]
                if not choice.is_over:
                    self.end(
                        choice.stream_id, reason=FinishReason.CANCELLED, num_output_tokens=None
                    )

    def end(self, stream_id: int, *, reason: int, num_output_tokens: int | None) -> None:
        """Ask the core to end a choice of an own request; `reason` is a FinishReason number."""
        self._send(
            EndStream(stream_id=stream_id, reason=reason, num_output_tokens=num_output_tokens)
        )

    async def query(self, kind: str, argument: bytes = b"{}", *, grace_s: float = 0.0) -> bytes:
        """
        Ask the core; see scheduler_svc.ipc.snapshot for kinds, arguments and answers.

        Args:
            kind: Of the question.
            argument: As JSON.
            grace_s: How long the core was asked to wait before it answers.

        Raises:
            HandedOver: The core is gone or does not answer in time.
            TandemError: The core's own answer.
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
            raise HandedOver(
                f"the scheduler core did not answer {kind!r} within {timeout_s:g} s"
            ) from None
        finally:
            del self._replies[query_id]
        if answer.error is not None:
            raise _error(answer.error)
        return answer.result

    def lose(self, error: TandemError) -> None:
        """
        The core is gone: end every query, and every stream that it had more to say of, with
        `error`, and take no more.
        """
        self._gone = error
        for inbox in self._inboxes.values():
            if not inbox.is_complete:
                inbox.refuse(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def _send(self, message: FrontendMessage) -> None:
        # The socket keeps order and its own backlog; nobody needs to wait for the pipe.
        sending = self._socket.send(encode(message))
        if not sending.done():
            self._sends.add(sending)
            sending.add_done_callback(self._sends.discard)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            self._last_message_s = self._clock()
            self._dispatch(decode_from_core(frame))
            # What is there already is taken together, so that a frontend that lags catches up; but
            # not without an end, or streams would never come to write what they were given.
            for _ in range(FRAMES_PER_TURN):
                try:
                    frame = await self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._dispatch(decode_from_core(frame))
            self._deliver_run()
            # Until these streams have sent what they got they need no more, and several steps
            # together cost little more than one.
            pause_s = min(MAX_PAUSE_S, self._num_fed * SEND_S)
            self._num_fed = 0
            await asyncio.sleep(pause_s if pause_s > MIN_PAUSE_S else 0)

    def _dispatch(self, message: CoreMessage) -> None:
        match message:
            case Update():
                self._apply(message)
            case Accepted():
                if inbox := self._inboxes.get(message.stream_id):
                    inbox.accept(message)
            case Refused():
                if inbox := self._inboxes.get(message.stream_id):
                    inbox.refuse(_error(message))
            case Reply():
                reply = self._replies.get(message.query_id)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case Availability():
                self.availability = message
                self.served.refusal = message.refusal
                self._notify()
            case Model():
                self.served.load(message, self._notify)
                self._notify()

    def _add_tokens(self, update: Update) -> None:
        streams, tokens = update.token_stream, update.token
        offsets = np.frombuffer(update.token_offset, np.int32)
        if self._run is not None and self._run.try_extend(streams, offsets, tokens):
            return
        self._deliver_run()
        self._run = TokenRun(streams, offsets, tokens)

    def _add_logprobs(self, logprobs: StreamLogprobs) -> None:
        columns = LogprobColumns(
            row=np.empty(0, np.int32),
            chosen=np.frombuffer(logprobs.chosen, np.float32),
            top_start=np.frombuffer(logprobs.top_start, np.int32),
            top_token=np.frombuffer(logprobs.top_token, np.int32),
            top=np.frombuffer(logprobs.top, np.float32),
        )
        streams = memoryview(logprobs.stream).cast("I")
        offsets = memoryview(logprobs.offset).cast("i")
        for stream, offset, entry in zip(streams, offsets, columns.entries(), strict=True):
            if choice := self._choices.get(stream):
                choice.put_logprob(offset, entry)

    def _deliver_run(self) -> None:
        """Give streams the tokens that came and were not delivered yet."""
        run, self._run = self._run, None
        if run is None:
            return
        choices = self._choices
        self._num_fed += run.num_streams
        for stream_id, offset, token_ids in run.by_stream():
            if choice := choices.get(stream_id):
                choice.put_tokens(offset, token_ids)

    def _apply(self, update: Update) -> None:
        choices = self._choices
        for logprobs in update.logprobs:
            self._add_logprobs(logprobs)
        if update.token:
            self._add_tokens(update)
        if not (update.progress or update.ended or update.failed):
            return
        self._deliver_run()
        for progress in update.progress:
            if choice := choices.get(progress.stream_id):
                choice.put_progress(progress)
        for end in update.ended:
            if choice := choices.get(end.stream_id):
                choice.put_end(end)
        for failed in update.failed:
            if choice := choices.get(failed.stream_id):
                choice.put_failure(_error(failed))

    async def _sweep(self) -> None:
        next_ping_s, was_alive = 0.0, True
        now_s = self._clock()
        while True:
            self.num_turns += 1
            expected_s = now_s + SWEEP_INTERVAL_S
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now_s = self._clock()
            late_s = now_s - expected_s
            if late_s > SWEEP_INTERVAL_S:
                self._forgive(late_s, now_s)
            for inbox in list(self._inboxes.values()):
                inbox.sweep(
                    now_s,
                    stall_deadline_s=self._settings.stall_deadline_s,
                    progress_interval_s=self._settings.progress_interval_s,
                )
            if now_s >= next_ping_s:
                next_ping_s = now_s + PING_INTERVAL_S
                self._send(Query(query_id=0, kind="stats", argument=b"{}"))
            if self.is_alive() != was_alive:
                was_alive = not was_alive
                log.warning("core_liveness_changed", alive=was_alive)
                self._notify()

    def _forgive(self, seconds: float, now_s: float) -> None:
        """Blame nobody for time in which this process stood still."""
        self._last_message_s = min(now_s, self._last_message_s + seconds)
        for inbox in self._inboxes.values():
            inbox.forgive(seconds)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        """Close the socket; nothing may be called afterwards."""
        self._socket.close()


def _error(refused: Refused) -> TandemError:
    return ERROR_BY_REASON.get(refused.reason, InternalError)(
        refused.message,
        field=refused.field,
        retry_after_s=refused.retry_after_s,
        metadata=refused.metadata,
    )
