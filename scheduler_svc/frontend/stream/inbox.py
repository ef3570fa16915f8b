"""Where one request's news from the core waits for its client."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.frontend.stream.turns import Bell, Turns
from scheduler_svc.ipc.messages import Accepted, StreamEnd, StreamProgress
from tandem.errors import InternalError, SlowConsumer, TandemError
from tandem.link.logprobs import TokenLogprob

BYTES_PER_TOKEN = 4
BYTES_PER_LOGPROB = 64
"""About what a number in a list takes, and an entry around such numbers."""


class Received(NamedTuple):
    """
    What the client of one choice had before the request was handed to the core.

    Attributes:
        num_tokens: Output tokens; those that come go on after them.
        is_over: None will come, and no end.
    """

    num_tokens: int = 0
    is_over: bool = False


class ChoiceNews(NamedTuple):
    """
    New output of one choice, and its end once that came; `logprobs` of these tokens, where the
    request asked.
    """

    choice: int
    token_ids: list[int]
    end: StreamEnd | None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class News:
    """What arrived since the last look; everything that arrived meanwhile is merged into one."""

    choices: list[ChoiceNews] = field(default_factory=list)
    """Choices with something new."""
    progress: StreamProgress | None = None
    is_silent: bool = False
    """The client should get a sign of life."""
    failure: TandemError | None = None


class ChoiceInbox:
    """
    What the core says of one choice; it has a stream number of its own there.

    Attributes:
        stream_id: That number.
        choice: From 0.
        is_over: True once the core has nothing more to say of it.
        num_received: Output tokens that came so far, those the client had before included.
        progress: The newest.
    """

    __slots__ = (
        "_end", "_has_news", "_inbox", "_logprobs", "_num_logprobs", "_tokens", "_wake", "choice",
        "is_over", "num_received", "progress", "stream_id",
    )  # fmt: skip

    def __init__(self, inbox: StreamInbox, stream_id: int, choice: int, before: Received) -> None:
        self._inbox = inbox
        self._wake = inbox.wake
        self._has_news = False
        self._tokens = array("i")
        self._logprobs: list[TokenLogprob] | None = None
        """Of the first of these tokens and of those that follow; None where nobody asked."""
        self._num_logprobs = before.num_tokens
        """Output tokens up to the last one whose log probabilities came."""
        self._end: StreamEnd | None = None
        self.stream_id = stream_id
        self.choice = choice
        self.is_over = before.is_over
        self.num_received = before.num_tokens
        self.progress: StreamProgress | None = None

    def put_tokens(self, offset: int, token_ids: bytes) -> None:
        """
        Add output tokens; those seen before are ignored.

        Args:
            offset: Output offset of the first.
            token_ids: int32.
        """
        inbox = self._inbox
        if offset != self.num_received or inbox.is_closed:
            token_ids = self._unseen(offset, token_ids)
            if not token_ids:
                return
        self.num_received += len(token_ids) // BYTES_PER_TOKEN
        self._tokens.frombytes(token_ids)
        inbox.num_pending_bytes += len(token_ids)
        if inbox.num_pending_bytes > inbox.max_pending_bytes:
            inbox.give_up_if_slow()
        self._note_news()

    def ask_logprobs(self) -> None:
        """From now on no token is news before its log probabilities came."""
        self._logprobs = []

    def put_logprob(self, offset: int, logprob: TokenLogprob) -> None:
        """Add what belongs to the token at an output offset; one seen before is ignored."""
        inbox = self._inbox
        if self._logprobs is None or offset < self._num_logprobs or inbox.is_closed:
            return
        if offset > self._num_logprobs:
            self._fail(f"the log probabilities of output token {self._num_logprobs} were lost")
            return
        self._num_logprobs += 1
        self._logprobs.append(logprob)
        inbox.num_pending_bytes += BYTES_PER_LOGPROB * 2 * (1 + len(logprob.top_token_ids))
        if inbox.num_pending_bytes > inbox.max_pending_bytes:
            inbox.give_up_if_slow()
        if len(self._logprobs) <= len(self._tokens):
            self._note_news()

    def put_progress(self, progress: StreamProgress) -> None:
        """Replace the last progress."""
        self.progress = progress
        self._inbox.note_progress(self)

    def put_end(self, end: StreamEnd) -> None:
        """The choice ended well."""
        self.is_over = True
        if self._logprobs is not None and self._num_logprobs < self.num_received:
            self._fail(f"the log probabilities of output token {self._num_logprobs} were lost")
            return
        self._end = end
        self._note_news()

    def put_failure(self, error: TandemError) -> None:
        """The choice failed, and with it the request."""
        self.is_over = True
        self._inbox.put_failure(error)

    def take(self) -> ChoiceNews:
        """All its news since the last call."""
        tokens, logprobs, end = self._tokens, self._logprobs, self._end
        self._has_news, self._tokens, self._end = False, array("i"), None
        if logprobs is None:
            return ChoiceNews(self.choice, tokens.tolist(), end)
        count = min(len(tokens), len(logprobs))
        self._tokens, self._logprobs = tokens[count:], logprobs[count:]
        return ChoiceNews(self.choice, tokens[:count].tolist(), end, logprobs[:count])

    def _note_news(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._inbox.with_news.append(self)
            self._wake()

    def _fail(self, what: str) -> None:
        self._inbox.put_failure(InternalError(f"{what} between core and frontend"))

    def _unseen(self, offset: int, token_ids: bytes) -> bytes:
        """Those of the tokens that are of use."""
        num_seen = self.num_received - offset
        if num_seen < 0 and not self._inbox.is_closed:
            self._fail(f"output token {self.num_received} was lost")
        return b"" if self._inbox.is_closed else token_ids[num_seen * BYTES_PER_TOKEN :]


class StreamInbox:
    """
    Owned by the event loop: the reader of the core's socket puts, the request's task takes.

    Putting never waits. What the task has not taken yet is merged, so a slow client costs the ids
    it has not read, 4 bytes each, and no more than `max_pending_bytes` over all choices; past that,
    or when one message waits too long for the client, the request alone ends with `SlowConsumer`.

    Attributes:
        choices: One per choice, with consecutive stream numbers.
        accepted: What the core took the request as; None until then.
        last_sent_s: When the client last got a message; see `sweep`.
        num_pending_bytes: Of output of all choices that was not taken yet.
        max_pending_bytes: More of them than this may not wait for the client.
        is_closed: Further output is of no use.
        wake: Say that something arrived.
        with_news: Choices of which something was not taken yet.
    """

    def __init__(
        self,
        first_stream_id: int,
        *,
        before: Sequence[Received] = (Received(),),
        with_logprobs: bool = False,
        max_pending_bytes: int,
        now_s: float,
        turns: Turns | None = None,
    ) -> None:
        self._something = Bell(turns or Turns())
        self.wake = self._something.ring
        self.is_closed = False
        self.with_news: list[ChoiceInbox] = []
        self.max_pending_bytes = max_pending_bytes
        self.choices = [
            ChoiceInbox(self, first_stream_id + choice, choice, one)
            for choice, one in enumerate(before)
        ]
        if with_logprobs:
            for one in self.choices:
                one.ask_logprobs()
        self.accepted: Accepted | None = None
        self.last_sent_s = now_s
        self.num_pending_bytes = 0
        self._news = News()
        self._write_began_s: float | None = None
        self._writer: asyncio.Task[object] | None = None
        self._slow: SlowConsumer | None = None

    @property
    def progress(self) -> StreamProgress | None:
        """Newest progress of the lowest-numbered choice that is not over."""
        leader = self._leader()
        return None if leader is None else leader.progress

    @property
    def is_complete(self) -> bool:
        """True once the core has nothing more to say of the request."""
        return self.accepted is not None and all(choice.is_over for choice in self.choices)

    def accept(self, accepted: Accepted) -> None:
        """The core took the request."""
        self.accepted = accepted
        self._something.ring()

    def refuse(self, error: TandemError) -> None:
        """The core took none of its choices, or cannot be asked any more."""
        for choice in self.choices:
            choice.is_over = True
        self.put_failure(error)

    def put_failure(self, error: TandemError) -> None:
        """The request failed; the first failure stays."""
        self.is_closed = True
        if self._news.failure is None:
            self._news.failure = error
        self._something.ring()

    async def wait(self) -> None:
        """Return when there is news, and it is this stream's turn."""
        await self._something.wait()

    def take(self) -> News:
        """All news since the last call."""
        news, self._news = self._news, News()
        news.choices = [choice.take() for choice in self.with_news]
        self.with_news.clear()
        self.num_pending_bytes = 0
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
                self._something.ring()
        elif now_s - self._write_began_s >= stall_deadline_s:
            self._give_up(f"a message waited {stall_deadline_s:g} s for the client")

    def forgive(self, seconds: float) -> None:
        """Blame nobody for this much of the time: this process itself did nothing then."""
        self.last_sent_s += seconds
        if self._write_began_s is not None:
            self._write_began_s += seconds

    # For its choices

    def give_up_if_slow(self) -> None:
        """More waits for the client than may: end it, if it is the client who is awaited."""
        if self._write_began_s is not None:
            self._give_up(f"{self.num_pending_bytes:,} bytes of output wait for the client")

    def note_progress(self, choice: ChoiceInbox) -> None:
        """A choice changed place; the client hears of it if this is the one it hears of."""
        if choice is self._leader():
            unsent = self._news.progress
            # What was found cached is told once; how far the prompt is comes again.
            if unsent is None or unsent.kind != ProgressKind.SCHEDULED:
                self._news.progress = choice.progress
            self._something.ring()

    def _leader(self) -> ChoiceInbox | None:
        return next((choice for choice in self.choices if not choice.is_over), None)

    def _give_up(self, why: str) -> None:
        if self._slow is not None or self._writer is None:
            return
        self.is_closed = True
        self._slow = SlowConsumer(f"{why}: read faster, or resume from the output you have")
        self._writer.cancel()
