"""One stream of a batch, in the form that gRPC's own calls of streams have."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from tandem.errors import SlowConsumer
from tandem.inference.v1 import batch_pb2
from tandem.status import to_status_proto
from tandem_openai_gateway.upstream import Delta, ItemFailure, delta_from_proto

MAX_WAITING_BYTES = 2 << 20
"""Most memory of a stream's output that waits for its HTTP client; more ends the stream."""
EVENT_BYTES = 300
"""Memory of an event beside its encoded size."""


class ItemCall:
    """
    One item of a batch. The stream's reader iterates it and cancels it at its end; the batch
    feeds it. What the reader has not taken waits here, as a batch is read on for its other items.

    Attributes:
        number: Its number in the batch.
        has_begun: True once the scheduler has sent an event of it.
        is_ended: True after the scheduler has ended it.
    """

    def __init__(
        self,
        number: int,
        leave: Callable[[ItemCall], None],
        start_alone: Callable[[], Any],
        *,
        joins: bool,
    ) -> None:
        """
        Args:
            number: Its number in the batch.
            leave: Called when its reader has ended with it; may be called again.
            start_alone: Function that starts a call of its own, if the batch does not take it.
            joins: True: deltas of a choice that wait become one.
        """
        self.number = number
        self.has_begun = False
        self.is_ended = False
        self._leave = leave
        self._start_alone = start_alone
        self._joins = joins
        self._events: deque[list[Delta] | batch_pb2.BatchEvent] = deque()
        """
        Events that wait for the reader. Output is decoded at once: an event that is kept would keep
        the whole message of the batch.
        """
        self._waiting: dict[int, list[Delta]] = {}
        """Output of each choice that waits, where deltas are joined."""
        self._waiting_bytes = 0
        self._failure: grpc.RpcError | None = None
        self._is_cancelled = False
        self._is_alone = False
        self._alone: Any = None
        self._reader: asyncio.Future[None] | None = None

    def take(self, event: batch_pb2.BatchEvent, kind: str) -> None:
        """Take the next event from the batch; `kind` is the member that it has."""
        self.has_begun = True
        if kind == "done":
            self.is_ended = True
        if self._events:
            self._waiting_bytes += event.ByteSize() + EVENT_BYTES
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self._failure = _too_slow()
                self._leave(self)
                return
        if kind == "delta":
            self._take_delta(delta_from_proto(event.delta))
        else:
            self._events.append(event)
        self._wake()

    def _take_delta(self, delta: Delta) -> None:
        if self._joins:
            waiting = self._waiting.get(delta.choice)
            if waiting is not None:
                waiting.append(delta)
                return
            self._waiting[delta.choice] = waiting = [delta]
            self._events.append(waiting)
        else:
            self._events.append([delta])

    def fail(self, failure: grpc.RpcError) -> None:
        """End with a failure, which the reader finds after the events that wait."""
        self.is_ended = True
        self._failure = failure
        self._wake()

    def end(self) -> None:
        """End without a last event, as a call may that the scheduler ends too early."""
        self.is_ended = True
        self._wake()

    def go_alone(self) -> None:
        """Become a call of its own, as the scheduler did not take the item."""
        self.is_ended = self._is_alone = True
        self._wake()

    def cancel(self) -> None:
        """End the item; safe to call more than once."""
        self._is_cancelled = True
        self._leave(self)
        if self._alone is not None:
            self._alone.cancel()
        self._wake()

    async def __aiter__(self) -> AsyncIterator[Any]:
        events, waiting = self._events, self._waiting
        while True:
            while events:
                event = events.popleft()
                if isinstance(event, list):
                    waiting.pop(event[0].choice, None)
                    yield event[0] if len(event) == 1 else _joined(event)
                else:
                    yield event
            self._waiting_bytes = 0
            if self._is_cancelled:
                raise asyncio.CancelledError  # as gRPC's calls do
            if self._is_alone:
                self._alone = self._start_alone()
                async for response in self._alone:
                    yield response
                return
            if self._failure is not None:
                raise self._failure
            if self.is_ended:
                return
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Return consecutive deltas of a choice as one."""
    return Delta(
        choice=deltas[0].choice,
        first_token_offset=deltas[0].first_token_offset,
        token_ids=tuple(token_id for one in deltas for token_id in one.token_ids),
        text="".join([one.text for one in deltas]),
        logprobs=tuple(told for one in deltas for told in one.logprobs),
    )


def _too_slow() -> ItemFailure:
    error = SlowConsumer("too much output waits for the HTTP client: read faster")
    status = to_status_proto(error).SerializeToString()
    return ItemFailure(grpc.StatusCode.ABORTED, error.message, status)
