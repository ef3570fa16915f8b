"""One item of a batch: its output as events of the shared stream."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context

from scheduler_svc.frontend.serving import with_tokens_emitted
from scheduler_svc.frontend.stream.delta import OutputDelta, encode_response
from scheduler_svc.frontend.stream.shared_write import ItemBell, SharedWrite
from scheduler_svc.frontend.stream.stream import RequestOutput
from tandem.errors import TandemError
from tandem.inference.v1.batch_pb2 import BatchEvent, GenerateBatchResponse
from tandem.link.codec.varint import LENGTH_DELIMITED, VARINT, tag, varint
from tandem.status import to_status_proto

_EVENT = tag(GenerateBatchResponse, "events", LENGTH_DELIMITED)
_ITEM = tag(BatchEvent, "item", VARINT)
TOGETHER_S = 0.01
"""Longest time that an item waits beyond its own pause for others that are due with it."""
_ERROR = tag(BatchEvent, "error", LENGTH_DELIMITED)


def due_after(now_s: float, pause_s: float) -> float:
    """
    Return the time of an item's next event, no sooner than after a pause. It is a multiple of the
    pause up to `TOGETHER_S`, so that items with pauses are due, and sent, together.
    """
    grid_s = min(pause_s, TOGETHER_S)
    return math.ceil((now_s + pause_s) / grid_s) * grid_s


class Item:
    """
    One item in flight. Owned by the stream's tasks, on one event loop.

    Attributes:
        number: Its number on the stream.
        bell: Is rung when there may be events.
        over: Set once its last event was sent.
        is_cancelled: True once the client asked to end it.
        output: Its output; None until it was submitted to the core.
        failure: Error that it failed with outside of its output.
        is_ended: True once its last event was returned.
        log_context: Context of its task, with the ids that its log lines have.
    """

    def __init__(
        self,
        number: int,
        line: deque[ItemBell],
        ring_stream: Callable[[], None],
        write: SharedWrite,
    ) -> None:
        self._number_field = _ITEM + varint(number)
        self._num_tokens: int | None = None
        self._due_s = 0.0
        self._has_alarm = False
        self.number = number
        self.bell = ItemBell(number, line, ring_stream, write)
        self.over = asyncio.Event()
        self.is_cancelled = False
        self.output: RequestOutput | None = None
        self.failure: TandemError | None = None
        self.is_ended = False
        self.log_context: Context | None = None
        self.request_id = ""

    def fail(self, error: TandemError) -> None:
        """End the item with an error, once its task knows of one."""
        if self.failure is None:
            # The frames that it passed refer to this item. Left to the collector, thousands of
            # refused items would be freed in one go, for which all calls would wait.
            self.failure = error.with_traceback(None)
            self.bell.ring()

    def events(self) -> list[bytes]:
        """
        Return the encoded events that are due; the last one sets `is_ended`.

        Raises:
            TandemError: The output cannot go on; give it to `fail`.
        """
        self.bell.answer()
        if self.is_ended:
            return []
        if self.failure is not None:
            self.is_ended = True
            return [self._failed(self.failure)]
        output = self.output
        if output is None or (self._due_s and self._is_early(output)):
            return []
        messages = [] if output.is_started else output.start()
        if not output.is_started:
            return []
        messages += output.take()
        encoded = []
        for message in messages:
            self._num_tokens = self._num_tokens or 0
            if isinstance(message, OutputDelta):
                self._num_tokens += len(message.chunk.token_ids)
            encoded.append(self._event(encode_response(message)))
        if output.pause_s:
            self._due_s = due_after(asyncio.get_running_loop().time(), output.pause_s)
        if output.failure is not None:
            encoded.append(self._failed(output.failure))
        self.is_ended = output.is_over or output.failure is not None
        return encoded

    def _is_early(self, output: RequestOutput) -> bool:
        """Return True if the client wants no event yet; the bell then rings in time."""
        loop = asyncio.get_running_loop()
        if output.inbox.is_over or loop.time() >= self._due_s:
            return False
        if not self._has_alarm:
            self._has_alarm = True
            loop.call_at(self._due_s, self._ring_when_due)
        return True

    def _ring_when_due(self) -> None:
        self._has_alarm = False
        self.bell.ring()

    def _failed(self, error: TandemError) -> bytes:
        if self._num_tokens is not None:
            error = with_tokens_emitted(error, self._num_tokens)
        status = to_status_proto(error, request_id=self.request_id).SerializeToString()
        return self._event(_ERROR + varint(len(status)) + status)

    def _event(self, body: bytes) -> bytes:
        """Return a field `events`; a serialized GenerateResponse is a BatchEvent without item."""
        number = self._number_field
        return b"".join((_EVENT, varint(len(number) + len(body)), number, body))
