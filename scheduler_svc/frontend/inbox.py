"""Where one request's news from the core waits for its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from scheduler_svc.ipc.messages import StreamEnd, StreamProgress
from tandem.errors import InternalError, SlowConsumer, TandemError

BYTES_PER_TOKEN = 4


@dataclass(slots=True, kw_only=True)
class News:
    """What arrived since the last look; everything that arrived meanwhile is merged into one."""

    token_ids: list[int] = field(default_factory=list)
    progress: StreamProgress | None = None
    is_silent: bool = False
    """The client should get a sign of life."""
    end: StreamEnd | None = None
    failure: TandemError | None = None


class StreamInbox:
    """
    Owned by the event loop: the reader of the core's socket puts, the request's task takes.

    Putting never waits. What the task has not taken yet is merged, so a slow client costs the ids
    it has not read and no more than `max_pending_bytes` of them; past that, or when one message
    waits too long for the client, the request alone ends with `SlowConsumer`.
    """

    def __init__(self, stream_id: int, *, max_pending_bytes: int, now_s: float) -> None:
        self.stream_id = stream_id
        self.accepted = False
        self.is_over = False
        """True once the core has nothing more to say about this stream."""
        self.last_sent_s = now_s
        """When the client last got a message; see `sweep`."""
        self._max_pending_tokens = max(1, max_pending_bytes // BYTES_PER_TOKEN)
        self._next_offset = 0
        self._news = News()
        self._something = asyncio.Event()
        self._write_began_s: float | None = None
        self._writer: asyncio.Task[object] | None = None
        self._slow: SlowConsumer | None = None

    def accept(self) -> None:
        """The core took the request."""
        self.accepted = True
        self._something.set()

    def put_token(self, offset: int, token_id: int) -> None:
        """Add the token at this output offset; one seen before is ignored."""
        if offset < self._next_offset or self._slow or self._news.failure is not None:
            return
        if offset > self._next_offset:
            self.put_failure(
                InternalError(
                    f"output token {self._next_offset} was lost between core and frontend"
                )
            )
            return
        self._next_offset += 1
        self._news.token_ids.append(token_id)
        if len(self._news.token_ids) > self._max_pending_tokens and self._write_began_s is not None:
            self._give_up(f"{self._max_pending_tokens} tokens wait for the client")
        self._something.set()

    def put_progress(self, progress: StreamProgress) -> None:
        """Replace the last progress that was not taken."""
        self._news.progress = progress
        self._something.set()

    def put_end(self, end: StreamEnd) -> None:
        """The request ended well."""
        self.is_over = True
        self._news.end = end
        self._something.set()

    def put_failure(self, error: TandemError) -> None:
        """The request failed; the first failure stays."""
        if self._news.failure is None:
            self._news.failure = error
        self._something.set()

    async def wait(self) -> None:
        """Return when there is news."""
        await self._something.wait()
        self._something.clear()

    def take(self) -> News:
        """All news since the last call."""
        news, self._news = self._news, News()
        return news

    def begin_write(self, now_s: float) -> None:
        """The calling task starts waiting for the client to take a message."""
        self._write_began_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self, now_s: float) -> None:
        """The client took it."""
        self._write_began_s = None
        self.last_sent_s = now_s

    @property
    def slow(self) -> SlowConsumer | None:
        """Set when the writing task was cancelled because the client reads too slowly."""
        return self._slow

    def sweep(self, now_s: float, *, stall_deadline_s: float, progress_interval_s: float) -> None:
        """Called every now and then: wakes a silent stream, gives up on a stalled one."""
        if self._write_began_s is None:
            if now_s - self.last_sent_s >= progress_interval_s:
                self._news.is_silent = True
                self._something.set()
        elif now_s - self._write_began_s >= stall_deadline_s:
            self._give_up(f"a message waited {stall_deadline_s:g} s for the client")

    def _give_up(self, why: str) -> None:
        if self._slow is not None or self._writer is None:
            return
        self._slow = SlowConsumer(f"{why}: read faster, or resume from the output you have")
        self._writer.cancel()
