"""A running completion: what all streams share, and the stream for threads."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Self

import grpc

from tandem.errors import InternalError, TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.status import CallCancelled, from_rpc_error
from tandem_client.events import (
    Choice,
    Completion,
    Delta,
    Done,
    Event,
    Finished,
    PromptLogprobs,
    Started,
    completion_of,
)
from tandem_client.streams.interrupts import do_safely, read_safely
from tandem_client.streams.prompt import joined_prompt
from tandem_client.streams.resume import ResumableStream
from tandem_client.streams.retry import RetryPolicy, remaining_s, within

StartCall = Callable[[inference.GenerateRequest, float | None], Any]
"""Function that starts a Generate call with a time-out in seconds and returns gRPC's iterator."""


def deadline_after(limit_s: float | None) -> float | None:
    """Return the time on the monotonic clock at which a limit that begins now has passed."""
    return None if limit_s is None else time.monotonic() + limit_s


def text_of(events: Iterable[Event]) -> Iterator[str]:
    """Return an iterator over the new text of each delta of choice 0 that has text."""
    return (text for event in events if (text := new_text(event)))


def new_text(event: Event) -> str:
    """Return the text of choice 0 that an event brings; empty if it brings none."""
    return event.text if isinstance(event, Delta) and event.choice == 0 else ""


@dataclass(frozen=True)
class Break:
    """
    Failure of a call that another one follows.

    Attributes:
        error: What failed.
        wait_s: Seconds until the next call.
        within_s: The same, cut at the deadline.
        is_amid: True if the server had accepted the request.
    """

    error: TandemError
    wait_s: float
    within_s: float
    is_amid: bool


class BaseCalls:
    """
    The calls that one completion takes, one after the other, and its state between them.

    A stream owns its calls, which never refer to the stream. So a stream that is dropped, as by a
    `break` out of the loop over it, is freed at once and ends its call, instead of waiting for the
    garbage collector.
    """

    def __init__(
        self,
        start_call: StartCall,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        deadline_s: float | None,
    ) -> None:
        self._start_call = start_call
        key = secrets.token_hex(16)
        self._state = ResumableStream(request, policy, time.monotonic(), attempt_key=key)
        self._on_break = policy.on_break
        self._deadline_s = deadline_s
        self._call: Any = None
        """Call that runs; None before the first."""

    def _next_call(self) -> Any:
        """Start a call for what is left of the completion, and return it."""
        timeout_s = remaining_s(self._deadline_s, time.monotonic())
        self._call = self._start_call(self._state.request, timeout_s)
        return self._call

    def _cancel(self) -> None:
        """Cancel the call that runs, if any."""
        call = self._call
        if call is not None:
            call.cancel()

    def _on_failure(self, failure: grpc.RpcError) -> Break:
        """
        Prepare the next call after one that failed.

        Raises:
            TandemError: The stream cannot go on.
        """
        error = from_rpc_error(failure)
        now = time.monotonic()
        wait_s = self._state.on_failure(error, now, random.random())  # noqa: S311  # jitter
        within_s = within(wait_s, self._deadline_s, now)
        return Break(error, wait_s, within_s, is_amid=self._state.is_accepted)

    def tell(self, broken: Break) -> None:
        """Tell the policy's `on_break` of a break amid the stream."""
        if self._on_break is not None and broken.is_amid:
            self._on_break(broken.error, broken.wait_s)

    def _check_done(self) -> None:
        """Raise InternalError if a call ended well, but before the completion did."""
        if not self._state.done:
            raise InternalError("the server ended the stream before Done")


class ThreadCalls(BaseCalls):
    """Calls of a stream that a thread reads."""

    def __init__(
        self,
        start_call: StartCall,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        deadline_s: float | None,
    ) -> None:
        super().__init__(start_call, request, policy, deadline_s)
        self._is_closed = False
        self._woken: SimpleQueue[None] = SimpleQueue()
        """Has an item once the calls are closed, for a wait between two calls."""

    def is_closed(self) -> bool:
        """Return True once `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """End the events; safe from any thread, and more than once."""
        self._is_closed = True
        self._woken.put(None)
        do_safely(self._cancel)

    def events(self) -> Generator[Event | Break, None, None]:
        """
        Yield the events of all calls, and each break: `tell` is for the thread that reads them,
        which has the events before the break by then.

        Closing this generator cancels the call that runs.
        """
        while not self.is_closed():
            try:
                yield from self._one_call()
            except grpc.RpcError as failure:
                if self.is_closed():
                    return
                broken = self._on_failure(failure)
                yield broken
                with contextlib.suppress(Empty):
                    self._woken.get(timeout=broken.within_s)
                continue
            if not self.is_closed():
                self._check_done()
            return

    def _one_call(self) -> Iterator[Event]:
        call = self._next_call()
        if self.is_closed():  # by another thread, which saw no call yet or the previous one
            call.cancel()
        try:
            for response in call:
                event = self._state.accept(response, time.monotonic())
                if self.is_closed():
                    return
                if event is not None:
                    yield event
        finally:
            call.cancel()
            # gRPC's object is freed here, not in the thread that frees the stream.
            self._call = None


class BaseStream:
    """
    Common part of streams for threads and for asyncio: what stays to be asked for when the stream
    has been read.

    Attributes:
        started: Acceptance of the request; None before it arrives.
        finished_choices: Ends of the choices that ended, by choice number.
        done: Usage and timings; None before the last event.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished_choices: dict[int, Finished] = {}
        self.done: Done | None = None
        self._deltas: dict[int, list[Delta]] = {}
        self._prompt: list[PromptLogprobs] = []

    @property
    def finished(self) -> Finished | None:
        """End of choice 0; None before it ends."""
        return self.finished_choices.get(0)

    def _note(self, event: Event) -> None:
        match event:
            case Delta():
                self._deltas.setdefault(event.choice, []).append(event)
            case PromptLogprobs():
                self._prompt.append(event)
            case Started():
                self.started = event
            case Finished():
                self.finished_choices[event.choice] = event
            case Done():
                self.done = event

    def _completion(self) -> Completion:
        """
        Return the whole completion.

        Raises:
            CallCancelled: The stream was closed before it ended.
        """
        if self.started is None or self.done is None:
            raise CallCancelled("the stream was closed before its completion had ended")
        ends = sorted(self.finished_choices.values(), key=lambda end: end.choice)
        choices, prompt = tuple(map(self._choice, ends)), joined_prompt(self._prompt)
        return completion_of(self.started, choices, self.done, prompt)

    def _choice(self, end: Finished) -> Choice:
        deltas = self._deltas.get(end.choice, [])
        return Choice(
            choice=end.choice,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(one for delta in deltas for one in delta.token_ids),
            reason=end.reason,
            matched=end.matched,
            logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        )


class GenerationStream(BaseStream):
    """
    Iterator over the events of a completion, over its text with `text`, or over the texts of
    several choices with `texts`; all consume the same stream. Closing it, leaving its `with` or
    dropping it, as a `break` out of `for text in client.generate(...).text` does, cancels the
    request on the server.
    """

    def __init__(
        self,
        start_call: StartCall,
        request: inference.GenerateRequest,
        policy: RetryPolicy,
        deadline_s: float | None,
    ) -> None:
        super().__init__()
        self._calls = ThreadCalls(start_call, request, policy, deadline_s)
        self._events: Iterator[Event | Break] = read_safely(self._calls)

    @property
    def text(self) -> Iterator[str]:
        """New text of each delta of choice 0 that has text."""
        return text_of(self)

    @property
    def texts(self) -> Iterator[tuple[int, str]]:
        """Choice and new text of each delta that has text."""
        deltas = (event for event in self if isinstance(event, Delta))
        return ((delta.choice, delta.text) for delta in deltas if delta.text)

    def result(self) -> Completion:
        """
        Read the stream to its end, and return the whole completion, with what was read before.

        Raises:
            TandemError: The request failed.
            CallCancelled: The stream was closed before it ended.
        """
        for _ in self:
            pass
        return self._completion()

    def close(self) -> None:
        """Cancel the running call, if any; safe from any thread, and more than once."""
        self._calls.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while isinstance(event := next(self._events), Break):
            self._calls.tell(event)
        self._note(event)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
