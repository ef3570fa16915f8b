"""Many Generates over one GenerateBatch stream, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tandem.inference.v1 import batch_pb2
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem_client.many import items
from tandem_client.streams.stream import StartCall

GOODBYE_S = 1.0
"""Longest wait for the end of a stream whose items have all ended."""
OpenStream = Callable[[AsyncIterator[pb.GenerateBatchRequest]], Any]
"""Function that starts a GenerateBatch call and returns gRPC's iterator."""
News = batch_pb2.BatchEvent | grpc.RpcError | None
"""News of an item: an event, the end of its stream by a failure, or its end without one."""


class SharedStream:
    """Starts Generates as items of a stream, as that of `shared_threads` does, in one loop."""

    def __init__(self, open_stream: OpenStream, start_call: StartCall) -> None:
        """
        Args:
            open_stream: Opens the stream.
            start_call: Starts a call of its own for what cannot be an item.
        """
        self._open_stream = open_stream
        self._start_call = start_call
        self._stream: _Stream | None = None

    def start(self, request: pb.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a Generate, and return the iterator over its responses."""
        if not items.can_be_item(request):
            return self._start_call(request, timeout_s)
        if self._stream is None or not self._stream.takes_items:
            self._stream = _Stream(self._open_stream)
        item = _ItemCall(self._stream, self._start_call, request, timeout_s)
        self._stream.add(item)
        return item

    async def close(self) -> None:
        """End the stream, and whatever items it still has."""
        if self._stream is not None:
            await self._stream.close()


class _Stream:
    """One call, which a task of its own reads."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._items: dict[int, _ItemCall] = {}
        self._num_added = 0
        self._requests: asyncio.Queue[pb.GenerateBatchRequest] = asyncio.Queue()
        self.takes_items = True
        self._call = open_stream(items.joined_requests(self._requests))
        self._reading = asyncio.create_task(self._read())

    def add(self, item: _ItemCall) -> None:
        """Send an item."""
        self._num_added += 1
        item.number = self._num_added
        self._items[item.number] = item
        add = [pb.BatchItem(item=item.number, request=item.request)]
        self._requests.put_nowait(pb.GenerateBatchRequest(add=add))

    def cancel(self, number: int) -> None:
        """Cancel an item, unless it has ended."""
        if self._items.pop(number, None) is not None:
            self._requests.put_nowait(pb.GenerateBatchRequest(cancel=[number]))
            self._end_if_idle()

    async def close(self) -> None:
        """Take no more items, and end those that have not ended."""
        self.takes_items = False
        self._end_if_idle()
        if not self._items:
            await asyncio.wait((self._reading,), timeout=GOODBYE_S)
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    def _end_if_idle(self) -> None:
        # Not before: what is half-closed cannot cancel an item.
        if not self.takes_items and not self._items:
            self._requests.put_nowait(items.END_OF_REQUESTS)

    async def _read(self) -> None:
        failure: grpc.RpcError | None = None
        try:
            async for message in self._call:
                for event in message.events:
                    self._on_event(event)
        except grpc.RpcError as error:
            failure = error
        finally:
            left = list(self._items.values())
            self._items.clear()
            self.takes_items = False
            self._end_if_idle()
            for item in left:
                item.hear(failure)

    def _on_event(self, event: batch_pb2.BatchEvent) -> None:
        if not items.is_last(event):
            item = self._items.get(event.item)
            if item is not None:
                item.hear(event)
            return
        item, failure = self._items.pop(event.item, None), items.failure_of(event)
        if failure is not None and items.is_leaving(failure):
            self.takes_items = False
        self._end_if_idle()
        if item is not None:
            item.hear(event if failure is None else failure)


class _ItemCall:
    """One item, read by one task as the call that it stands for."""

    def __init__(
        self,
        stream: _Stream,
        start_call: StartCall,
        request: pb.GenerateRequest,
        timeout_s: float | None,
    ) -> None:
        self._stream = stream
        self._start_call = start_call
        self._ends_at_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._own_call: Any = None
        self.request = request
        self.number = 0

    def hear(self, news: News) -> None:
        """Take news."""
        self._news.put_nowait(news)

    def cancel(self) -> None:
        """End the item, if it has not ended."""
        self._stream.cancel(self.number)
        self._news.put_nowait(items.cancelled())
        if self._own_call is not None:
            self._own_call.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        has_begun = False
        while True:
            news = await self._next()
            if isinstance(news, batch_pb2.BatchEvent):
                has_begun = True
                yield news
                if items.is_last(news):
                    return
            elif isinstance(news, items.ItemFailure) and not items.has_too_many(news):
                raise news
            elif has_begun:
                raise items.broken(news)
            else:
                break
        self._own_call = self._start_call(self.request, self._left_s())
        async for response in self._own_call:
            yield response

    async def _next(self) -> News:
        if self._ends_at_s is None:
            return await self._news.get()
        try:
            async with asyncio.timeout(self._left_s()):
                return await self._news.get()
        except TimeoutError:
            self._stream.cancel(self.number)
            raise items.timed_out() from None

    def _left_s(self) -> float | None:
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - time.monotonic())
