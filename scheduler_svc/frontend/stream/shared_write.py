"""Writing of a stream that many requests share, and the bell of each of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tandem.errors import SlowConsumer

MAX_TOKENS_PER_EVENT = 2048
"""Most tokens of one event, so that a message stays below its bound however long it waited."""
MAX_LOGPROBS_PER_EVENT = 128
"""The same where every token comes with log probabilities, a hundred times as large."""


class HasPendingBytes(Protocol):
    """Inbox of a request, as far as its size goes."""

    num_pending_bytes: int


class SharedWrite:
    """
    Writing of one stream that many requests share. Owned by the event loop.

    Attributes:
        inboxes: Inboxes of its requests.
        slow: Error that is set when the writing task was cancelled as the client is too slow.
    """

    def __init__(self, max_pending_bytes: int) -> None:
        """
        Args:
            max_pending_bytes: Most output of all requests that may wait while a message does.
        """
        self._max_pending_bytes = max_pending_bytes
        self._began_s: float | None = None
        self._writer: asyncio.Task[object] | None = None
        self.inboxes: set[HasPendingBytes] = set()
        self.slow: SlowConsumer | None = None

    @property
    def is_writing(self) -> bool:
        """True while a message waits for the client."""
        return self._began_s is not None

    def begin_write(self, now_s: float) -> None:
        """Note that the calling task starts to wait for the client to take a message."""
        self._began_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self, now_s: float) -> None:
        """Note that the client took the message."""
        del now_s
        self._began_s = None

    def sweep(self, now_s: float, *, stall_deadline_s: float) -> None:
        """End a stream whose client does not read; called at regular intervals."""
        if self._began_s is None or self.slow is not None or self._writer is None:
            return
        waiting_bytes = sum(inbox.num_pending_bytes for inbox in self.inboxes)
        if now_s - self._began_s >= stall_deadline_s:
            self.slow = slow_consumer(f"a message waited {stall_deadline_s:g} s for the client")
        elif waiting_bytes > self._max_pending_bytes:
            self.slow = slow_consumer(f"{waiting_bytes:,} bytes of output wait for the client")
        else:
            return
        self._writer.cancel()

    def forgive(self, seconds: float) -> None:
        """Leave `seconds` out of the wait, as this process itself stood still then."""
        if self._began_s is not None:
            self._began_s += seconds


class ItemBell:
    """
    Bell of one request of a shared stream: rung any number of times, it puts the request once into
    the line of those with news.
    """

    __slots__ = ("_is_rung", "_line", "_ring_stream", "item", "write")

    def __init__(
        self,
        item: int,
        line: deque[ItemBell],
        ring_stream: Callable[[], None],
        write: SharedWrite,
    ) -> None:
        self._is_rung = False
        self._line = line
        self._ring_stream = ring_stream
        self.item = item
        self.write = write

    def ring(self) -> None:
        """Let the stream look at the request."""
        if not self._is_rung:
            self._is_rung = True
            self._line.append(self)
            self._ring_stream()

    def answer(self) -> None:
        """Note that the stream looks at the request now."""
        self._is_rung = False

    async def wait(self) -> None:
        """Fail: the stream waits, for all its requests at once."""
        raise NotImplementedError("a request of a shared stream has no task that waits")

    @staticmethod
    def max_taken(*, with_logprobs: bool) -> int:
        """Return the most tokens of a choice that one event may have."""
        return MAX_LOGPROBS_PER_EVENT if with_logprobs else MAX_TOKENS_PER_EVENT


def slow_consumer(why: str) -> SlowConsumer:
    """Return the error of a request whose client does not take its output."""
    return SlowConsumer(f"{why}: read faster, or resume from the output you have")
