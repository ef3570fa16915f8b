"""
Items of one GenerateBatch stream, each read as if it were a call of its own.

A request whose shared stream ends before its first event is sent again by itself: then its failure,
if there is one, is its own. One whose stream ends later is resumed, as after any broken stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import grpc
from google.rpc import status_pb2

from tandem.error_codes import ResourceExhausted
from tandem.inference.v1 import batch_pb2
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.status import from_rpc_error
from tandem_client.streams.retry import is_transient

MAX_SHARED_BYTES = 32 << 10
"""
Largest message to a shared stream, half of the least `max_request_bytes` that a server may set: one
that is too large ends the stream of all its items. A larger request has a call of its own.
"""
END_OF_REQUESTS = pb.GenerateBatchRequest()
"""Stands for the end of a stream's messages."""
_LIMIT = "max_items_in_flight"
_DETAILS = "grpc-status-details-bin"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class ItemFailure(grpc.RpcError):
    """Failure of one item, which reads as that of a call."""

    def __init__(self, code: grpc.StatusCode, details: str, status: bytes = b"") -> None:
        """
        Args:
            code: Code of the status.
            details: Message of the status.
            status: The serialized google.rpc.Status; empty if there is none.
        """
        super().__init__(details)
        self._code, self._details, self._status = code, details, status

    def code(self) -> grpc.StatusCode:
        """Return the code."""
        return self._code

    def details(self) -> str:
        """Return the message."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the status as the trailer that a call of its own would have had."""
        return ((_DETAILS, self._status),) if self._status else ()


def failure_of(event: batch_pb2.BatchEvent) -> ItemFailure | None:
    """Return the failure that an event tells; None if it tells another thing."""
    if event.WhichOneof("event") != "error":
        return None
    status = status_pb2.Status.FromString(event.error)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return ItemFailure(code, status.message, event.error)


def is_last(event: batch_pb2.BatchEvent) -> bool:
    """Return True for the last event of an item."""
    return event.WhichOneof("event") in ("done", "error")


def cancelled() -> ItemFailure:
    """Return the failure of an item that was cancelled here."""
    return ItemFailure(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")


def timed_out() -> ItemFailure:
    """Return the failure of an item whose deadline has passed."""
    return ItemFailure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def broken(failure: grpc.RpcError | None) -> ItemFailure:
    """Return the failure of an item with output whose stream ended, after which it is resumed."""
    why = "ended early" if failure is None else f"failed: {from_rpc_error(failure).message}"
    return ItemFailure(grpc.StatusCode.UNAVAILABLE, f"the shared stream {why}")


def has_too_many(failure: ItemFailure) -> bool:
    """Return True if the connection has no room for another item; a call waits for its turn."""
    error = from_rpc_error(failure)
    return isinstance(error, ResourceExhausted) and error.metadata.get("limit") == _LIMIT


def is_leaving(failure: ItemFailure) -> bool:
    """Return True if the server may be going, so that further items belong on another stream."""
    error = from_rpc_error(failure)
    return is_transient(error) and not isinstance(error, ResourceExhausted)


def at_once(get_nowait: Callable[[], pb.GenerateBatchRequest]) -> Iterator[pb.GenerateBatchRequest]:
    """Yield what a queue has, until it is empty."""
    with contextlib.suppress(queue.Empty, asyncio.QueueEmpty):
        while True:
            yield get_nowait()


def gather(
    request: pb.GenerateBatchRequest, waiting: Iterable[pb.GenerateBatchRequest]
) -> pb.GenerateBatchRequest | None:
    """
    Add waiting messages to one that is about to be sent, since a message costs more than its items.

    Args:
        request: The message.
        waiting: Messages, which are taken as long as they may be added.

    Returns:
        What was taken and not added: END_OF_REQUESTS, or a message that would make this one too
        large. None if nothing else waits.
    """
    num_bytes = request.ByteSize()
    for more in waiting:
        num_bytes += more.ByteSize()
        if more is END_OF_REQUESTS or num_bytes > MAX_SHARED_BYTES:
            return more
        request.MergeFrom(more)
    return None


async def joined_requests(
    waiting: asyncio.Queue[pb.GenerateBatchRequest],
) -> AsyncIterator[pb.GenerateBatchRequest]:
    """Yield a queue's messages until END_OF_REQUESTS, those that wait joined as `gather` does."""
    request = await waiting.get()
    while request is not END_OF_REQUESTS:
        left = gather(request, at_once(waiting.get_nowait))
        yield request
        request = await waiting.get() if left is None else left


def can_be_item(request: Any) -> bool:
    """Return True if a request can be an item."""
    return bool(request.ByteSize() < MAX_SHARED_BYTES)
