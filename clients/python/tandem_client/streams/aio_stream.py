"""A running completion for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Self

import grpc

from tandem.inference.v1 import inference_service_pb2 as inference
from tandem_client.events import Completion, Delta, Event
from tandem_client.streams.retry import RetryPolicy
from tandem_client.streams.stream import BaseCalls, BaseStream, StartCall, new_text


class LoopCalls(BaseCalls):
    """Calls of a stream that a task reads."""

    def __init__(
        self,
        start_call: StartCall,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        deadline_s: float | None,
    ) -> None:
        super().__init__(start_call, request, policy, deadline_s)
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End the events; safe to call more than once."""
        self._closed.set()
        self._cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of all calls; closing this generator cancels the call that runs."""
        while not self._closed.is_set():
            call = self._next_call()
            try:
                async for response in call:
                    event = self._state.accept(response, time.monotonic())
                    if event is not None:
                        yield event
            except grpc.RpcError as failure:
                if self._closed.is_set():
                    return
                broken = self._on_failure(failure)
                self.tell(broken)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(broken.within_s):
                        await self._closed.wait()
                continue
            except asyncio.CancelledError:
                # gRPC raises this both for our own cancel() and for a cancelled task.
                task = asyncio.current_task()
                if self._closed.is_set() and not (task is not None and task.cancelling()):
                    return
                raise
            finally:
                call.cancel()
                self._call = None
            self._check_done()
            return


class AsyncGenerationStream(BaseStream):
    """
    A stream like `GenerationStream`, for `async for`. Cancelling the task that iterates cancels the
    request too. One that is dropped cancels its request as soon as the event loop runs.
    """

    def __init__(
        self,
        start_call: StartCall,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        deadline_s: float | None,
    ) -> None:
        super().__init__()
        self._calls = LoopCalls(start_call, request, policy, deadline_s)
        self._events = self._calls.events()

    @property
    async def text(self) -> AsyncIterator[str]:
        """New text of each delta of choice 0 that has text."""
        async for event in self:
            if text := new_text(event):
                yield text

    @property
    async def texts(self) -> AsyncIterator[tuple[int, str]]:
        """Choice and new text of each delta that has text."""
        async for event in self:
            if isinstance(event, Delta) and event.text:
                yield event.choice, event.text

    async def result(self) -> Completion:
        """Read the stream to its end, and return the whole completion, as `GenerationStream`."""
        async for _ in self:
            pass
        return self._completion()

    async def close(self) -> None:
        """Cancel the running call, if any; safe to call more than once."""
        self._calls.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        self._note(event)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
