"""A running completion for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from tandem.errors import InternalError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.status import from_rpc_error
from tandem_client.events import Delta, Event
from tandem_client.resume import ResumableStream, SeenEvents
from tandem_client.retry import RetryPolicy
from tandem_client.stream import StartCall, remaining_s, within


class AsyncGenerationStream(SeenEvents):
    """
    A stream like `GenerationStream`, for `async for`. Cancelling the task that iterates cancels the
    request.
    """

    def __init__(
        self,
        start_call: StartCall,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        deadline_s: float | None,
    ) -> None:
        super().__init__()
        self._start_call = start_call
        key = secrets.token_hex(16)
        self._state = ResumableStream(request, policy, time.monotonic(), idempotency_key=key)
        self._on_break = policy.on_break
        self._deadline_s = deadline_s
        self._closed = asyncio.Event()
        self._call: Any = None
        self._events = self._run()

    @property
    async def text(self) -> AsyncIterator[str]:
        """New text of each delta of choice 0 that has text."""
        async for event in self:
            if isinstance(event, Delta) and event.choice == 0 and event.text:
                yield event.text

    async def aclose(self) -> None:
        """Cancel the running call, if any; safe to call more than once."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        self._note(event)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _run(self) -> AsyncIterator[Event]:
        while not self._closed.is_set():
            timeout_s = remaining_s(self._deadline_s, time.monotonic())
            self._call = call = self._start_call(self._state.request, timeout_s)
            try:
                async for response in call:
                    event = self._state.accept(response, time.monotonic())
                    if event is not None:
                        yield event
            except grpc.RpcError as failure:
                if self._closed.is_set():
                    return
                error = from_rpc_error(failure)
                now = time.monotonic()
                wait_s = self._state.on_failure(error, now, random.random())  # noqa: S311  # jitter
                if self._on_break is not None and self._state.is_accepted:
                    self._on_break(error, wait_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within(wait_s, self._deadline_s, now)):
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
            if not self._state.done:
                raise InternalError("the server ended the stream before Done")
            return
