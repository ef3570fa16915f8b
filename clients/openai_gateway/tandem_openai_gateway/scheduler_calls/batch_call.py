"""Streams to one scheduler that share a call: its messages bring events of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.inference.v1 import batch_pb2
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem_openai_gateway.scheduler_calls.item_call import ItemCall
from tandem_openai_gateway.upstream import (
    END_OF_REQUESTS,
    ItemFailure,
    can_be_item,
    failure_of,
    has_too_many,
    joined_requests,
)

STATUS_LOST = "Internal error from Core"
"""
Details that grpc.aio ends a call with whose server ended it while a request was being written, as
one does that refuses its credential: the status that the server sent is lost.
"""
Metadata = tuple[tuple[str, str], ...]


class BatchCall:
    """
    One GenerateBatch call. It is made in the event loop that uses it, and owns its items until they
    end. A message costs much more than an event in it, so that 64 streams that share one call cost
    the gateway and the scheduler less than 64 calls.

    Attributes:
        is_open: True while items may be added: it ends with its last item.
        is_unknown: True if the scheduler does not know this method; its items then have calls of
            their own.
    """

    def __init__(
        self,
        start: Callable[[AsyncIterator[inference.GenerateBatchRequest]], Any],
        *,
        joins: bool,
        on_closed: Callable[[BatchCall], None],
    ) -> None:
        """
        Args:
            start: Function that starts gRPC's call with an iterator of requests.
            joins: True: a delta that its reader has not taken is joined with the next one.
            on_closed: Called when no more items may be added.
        """
        self.is_open = True
        self.is_unknown = False
        self._joins = joins
        self._on_closed = on_closed
        self._items: dict[int, ItemCall] = {}
        self._last_number = 0
        self._waiting: asyncio.Queue[inference.GenerateBatchRequest] = asyncio.Queue()
        self._call = start(joined_requests(self._waiting))
        self._reading = asyncio.create_task(self._read(), name="read batch")

    def add(self, request: inference.GenerateRequest, start_alone: Callable[[], Any]) -> ItemCall:
        """
        Return a new item; the batch must be open.

        Args:
            request: Its request.
            start_alone: Function that starts a call of its own, for an item that the scheduler
                does not take into a batch.
        """
        assert self.is_open
        self._last_number += 1
        item = ItemCall(self._last_number, self._leave, start_alone, joins=self._joins)
        self._items[item.number] = item
        add = [inference.BatchItem(item=item.number, request=request)]
        self._waiting.put_nowait(inference.GenerateBatchRequest(add=add))
        return item

    async def close(self) -> None:
        """End the call with all its items."""
        self._shut()
        self._reading.cancel()
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _leave(self, item: ItemCall) -> None:
        """Forget an item; one that has not ended is cancelled."""
        if self._items.pop(item.number, None) is None:
            return
        if not self._items:
            self._shut()
            if not item.is_ended:
                self._call.cancel()
        elif not item.is_ended:
            self._waiting.put_nowait(inference.GenerateBatchRequest(cancel=[item.number]))

    async def _read(self) -> None:
        failure: grpc.RpcError | None = None
        try:
            async for message in self._call:
                self._hand_out(message)
        except grpc.RpcError as error:
            failure = error
        finally:
            self._end(failure)

    def _hand_out(self, message: batch_pb2.GenerateBatchResponse) -> None:
        for event in message.events:
            item = self._items.get(event.item)
            if item is None:
                continue  # its reader has left
            kind = event.WhichOneof("event")
            if kind == "error":
                failure = failure_of(event)
                assert failure is not None
                if has_too_many(failure):
                    item.go_alone()
                else:
                    item.fail(failure)
            elif kind is not None:
                item.take(event, kind)
            if item.is_ended:
                self._leave(item)

    def _end(self, failure: grpc.RpcError | None) -> None:
        """
        Hand the end of the call to the items that it has still. Where the status is lost, an item
        without events asks for it in a call of its own, and others broke.
        """
        self.is_unknown = failure is not None and failure.code() is grpc.StatusCode.UNIMPLEMENTED
        self._shut()
        left = list(self._items.values())
        self._items.clear()
        is_lost = failure is not None and failure.details() == STATUS_LOST
        if is_lost:
            failure = ItemFailure(grpc.StatusCode.UNAVAILABLE, "the call ended under a write")
        for item in left:
            if self.is_unknown or (is_lost and not item.has_begun):
                item.go_alone()
            elif failure is not None:
                item.fail(failure)
            else:
                item.end()

    def _shut(self) -> None:
        """Take no more items; gRPC's task that waits for requests finds that none come."""
        self.is_open = False
        self._waiting.put_nowait(END_OF_REQUESTS)
        self._on_closed(self)


class BatchCalls:
    """Batches of one scheduler: requests share one if they have the same metadata."""

    def __init__(self, stub: Any, *, joins: bool) -> None:
        """
        Args:
            stub: Methods of the scheduler.
            joins: As for `BatchCall`.
        """
        self._stub = stub
        self._joins = joins
        self._open: dict[Metadata, BatchCall] = {}
        self._is_known = True

    def generate(self, request: inference.GenerateRequest, metadata: Metadata) -> Any:
        """Start a request, in a batch where that can be; return its call."""

        def start_alone() -> Any:
            return self._stub.Generate(request, metadata=metadata)

        if not self._is_known or not can_be_item(request):
            return start_alone()
        batch = self._open.get(metadata)
        if batch is None:
            batch = self._open[metadata] = self._new(metadata)
        return batch.add(request, start_alone)

    def try_again(self) -> None:
        """Note that another scheduler may answer now, which may know batches."""
        self._is_known = True

    async def close(self) -> None:
        """End all batches."""
        await asyncio.gather(*(one.close() for one in list(self._open.values())))

    def _new(self, metadata: Metadata) -> BatchCall:
        def on_closed(batch: BatchCall) -> None:
            self._is_known = self._is_known and not batch.is_unknown
            if self._open.get(metadata) is batch:
                del self._open[metadata]

        return BatchCall(
            lambda requests: self._stub.GenerateBatch(requests, metadata=metadata),
            joins=self._joins,
            on_closed=on_closed,
        )
