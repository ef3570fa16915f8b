"""Many Generates over one GenerateBatch stream, for threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from tandem.inference.v1 import batch_pb2
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem_client.many import items
from tandem_client.streams.stream import StartCall

OpenStream = Callable[[Iterator[pb.GenerateBatchRequest]], Any]
"""Function that starts a GenerateBatch call and returns gRPC's iterator."""
News = batch_pb2.BatchEvent | grpc.RpcError | None
"""News of an item: an event, the end of its stream by a failure, or its end without one."""


class SharedStream:
    """
    Starts Generates as items of a stream, which is opened for the first and again after each end.
    """

    def __init__(self, open_stream: OpenStream, start_call: StartCall) -> None:
        """
        Args:
            open_stream: Opens the stream.
            start_call: Starts a call of its own for what cannot be an item.
        """
        self._open_stream = open_stream
        self._start_call = start_call
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def start(self, request: pb.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a Generate, and return the iterator over its responses."""
        if not items.can_be_item(request):
            return self._start_call(request, timeout_s)
        with self._lock:
            if self._stream is None or not self._stream.takes_items:
                self._stream = _Stream(self._open_stream)
            item = _ItemCall(self._stream, self._start_call, request, timeout_s)
            self._stream.add(item)
        return item

    def close(self) -> None:
        """End the stream, and whatever items it still has."""
        with self._lock:
            if self._stream is not None:
                self._stream.close()


class _Stream:
    """One call, which a thread of its own reads."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, _ItemCall] = {}
        self._num_added = 0
        self._requests: queue.SimpleQueue[pb.GenerateBatchRequest] = queue.SimpleQueue()
        self.takes_items = True
        self._call = open_stream(self._joined_requests())
        threading.Thread(target=self._read, name="generate_batch", daemon=True).start()

    def add(self, item: _ItemCall) -> None:
        """Send an item; without effect on a stream that has ended, which the item then hears."""
        with self._lock:
            self._num_added += 1
            item.number = self._num_added
            if not self.takes_items:
                item.hear(None)
                return
            self._items[item.number] = item
            add = [pb.BatchItem(item=item.number, request=item.request)]
            self._requests.put(pb.GenerateBatchRequest(add=add))

    def cancel(self, number: int) -> None:
        """Cancel an item, unless it has ended."""
        with self._lock:
            if self._items.pop(number, None) is not None:
                self._requests.put(pb.GenerateBatchRequest(cancel=[number]))
                self._end_if_idle()

    def close(self) -> None:
        """Take no more items, and end those that have not ended."""
        with self._lock:
            self.takes_items = False
            self._end_if_idle()
            has_items = bool(self._items)
        if has_items:
            self._call.cancel()

    def _end_if_idle(self) -> None:
        # Not before: what is half-closed cannot cancel an item.
        if not self.takes_items and not self._items:
            self._requests.put(items.END_OF_REQUESTS)

    def _joined_requests(self) -> Iterator[pb.GenerateBatchRequest]:
        request = self._requests.get()
        while request is not items.END_OF_REQUESTS:
            left = items.gather(request, items.at_once(self._requests.get_nowait))
            yield request
            request = self._requests.get() if left is None else left

    def _read(self) -> None:
        failure: grpc.RpcError | None = None
        try:
            for message in self._call:
                for event in message.events:
                    self._on_event(event)
        except grpc.RpcError as error:
            failure = error
        with self._lock:
            left = list(self._items.values())
            self._items.clear()
            self.takes_items = False
            self._end_if_idle()
        for item in left:
            item.hear(failure)

    def _on_event(self, event: batch_pb2.BatchEvent) -> None:
        with self._lock:
            is_over = items.is_last(event)
            item = self._items.pop(event.item, None) if is_over else self._items.get(event.item)
            failure = items.failure_of(event) if is_over else None
            if failure is not None and items.is_leaving(failure):
                self.takes_items = False
            if is_over:
                self._end_if_idle()
        if item is not None:
            item.hear(event if failure is None else failure)


class _ItemCall:
    """One item, read by one thread as the call that it stands for."""

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
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._own_call: Any = None
        self._is_cancelled = False
        self.request = request
        self.number = 0

    def hear(self, news: News) -> None:
        """Take news; called by any thread."""
        self._news.put(news)

    def cancel(self) -> None:
        """End the item, if it has not ended; called by any thread."""
        self._is_cancelled = True
        self._stream.cancel(self.number)
        self._news.put(items.cancelled())
        own_call = self._own_call
        if own_call is not None:
            own_call.cancel()

    def __iter__(self) -> Iterator[Any]:
        has_begun = False
        while True:
            news = self._next()
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
        yield from self._call_of_its_own()

    def _next(self) -> News:
        try:
            return self._news.get(timeout=self._left_s())
        except queue.Empty:
            self._stream.cancel(self.number)
            raise items.timed_out() from None

    def _call_of_its_own(self) -> Iterator[Any]:
        self._own_call = self._start_call(self.request, self._left_s())
        if self._is_cancelled:  # by another thread, which saw no call yet
            self._own_call.cancel()
        yield from self._own_call

    def _left_s(self) -> float | None:
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - time.monotonic())
