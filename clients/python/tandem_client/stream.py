"""A running completion for threads."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from tandem.errors import InternalError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.status import CallCancelled, from_rpc_error
from tandem_client.events import Delta, Event
from tandem_client.resume import ResumableStream, SeenEvents
from tandem_client.retry import RetryPolicy

StartCall = Callable[[inference.GenerateRequest, float | None], Any]
"""Function that starts a Generate call with a time-out in seconds and returns gRPC's iterator."""


def deadline_after(limit_s: float | None) -> float | None:
    """Return the time on the monotonic clock at which a limit that begins now has passed."""
    return None if limit_s is None else time.monotonic() + limit_s


def remaining_s(deadline_s: float | None, now: float) -> float | None:
    """
    Return the seconds left for the next call; None without a deadline.

    Raises:
        CallCancelled: The deadline has passed.
    """
    if deadline_s is None:
        return None
    if now >= deadline_s:
        raise CallCancelled(
            "the deadline passed before the call could be made",
            metadata={"grpc_code": "DEADLINE_EXCEEDED"},
        )
    return deadline_s - now


def within(wait_s: float, deadline_s: float | None, now: float) -> float:
    """Return the wait, cut at the deadline."""
    return wait_s if deadline_s is None else min(wait_s, max(0.0, deadline_s - now))


class GenerationStream(SeenEvents):
    """
    Iterator over the events of a completion, or over its text with `text`; both consume the same
    stream. Closing it (or leaving its `with`) cancels the request on the server.
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
        self._closed = threading.Event()
        self._call: Any = None
        self._events = self._run()

    @property
    def text(self) -> Iterator[str]:
        """New text of each delta of choice 0 that has text."""
        for event in self:
            if isinstance(event, Delta) and event.choice == 0 and event.text:
                yield event.text

    def close(self) -> None:
        """Cancel the running call, if any; safe from any thread, and more than once."""
        self._closed.set()
        call = self._call
        if call is not None:
            call.cancel()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = next(self._events)
        self._note(event)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> Iterator[Event]:
        while not self._closed.is_set():
            try:
                yield from self._one_call()
            except grpc.RpcError as failure:
                if self._closed.is_set():
                    return
                error = from_rpc_error(failure)
                now = time.monotonic()
                wait_s = self._state.on_failure(error, now, random.random())  # noqa: S311  # jitter
                if self._on_break is not None and self._state.is_accepted:
                    self._on_break(error, wait_s)
                self._closed.wait(within(wait_s, self._deadline_s, now))
                continue
            if not self._state.done:
                raise InternalError("the server ended the stream before Done")
            return

    def _one_call(self) -> Iterator[Event]:
        timeout_s = remaining_s(self._deadline_s, time.monotonic())
        self._call = call = self._start_call(self._state.request, timeout_s)
        if self._closed.is_set():  # by another thread, which saw no call yet or the previous one
            call.cancel()
        try:
            for response in call:
                event = self._state.accept(response, time.monotonic())
                if event is not None:
                    yield event
        finally:
            call.cancel()
