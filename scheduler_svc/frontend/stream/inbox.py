"""Inbox of one request, in which news from the core waits for the client."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.frontend.stream.logprob_entries import PromptScores
from scheduler_svc.frontend.stream.shared_write import ItemBell, slow_consumer
from scheduler_svc.frontend.stream.turns import Bell, StreamTurns
from scheduler_svc.ipc.messages import Accepted, StreamEnd, StreamProgress
from tandem.errors import InternalError, SlowConsumer, TandemError
from tandem.link.logprobs import TokenLogprob

BYTES_PER_TOKEN = 4
BYTES_PER_LOGPROB = 64
"""Approximate size of a number in a list; an entry around such numbers takes as much."""


class Received(NamedTuple):
    """
    Output of one choice that the client had before the request was submitted to the core.

    Attributes:
        num_tokens: Number of output tokens; new ones follow them.
        is_over: True if no more output and no end will come.
    """

    num_tokens: int = 0
    is_over: bool = False


class ChoiceNews(NamedTuple):
    """
    New output of one choice, and its end once that came; `logprobs` has one entry per token, or is
    None if the request did not ask for them.
    """

    choice: int
    token_ids: list[int]
    end: StreamEnd | None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class News:
    """News of a request since the last `take`, merged into one."""

    choices: list[ChoiceNews] = field(default_factory=list)
    """News of the choices that have any."""
    scores: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    """Log probabilities of prompt tokens, each with its negative offset from the prompt's end."""
    progress: StreamProgress | None = None
    is_silent: bool = False
    """True if the client should get a sign of life."""
    failure: TandemError | None = None


class ChoiceInbox:
    """
    Inbox of one choice, which has its own stream number in the core.

    Attributes:
        stream_id: The stream number.
        choice: Number of the choice, from 0.
        is_over: True once no more news of the choice comes from the core.
        num_received: Number of output tokens so far, with those that the client had before.
        progress: Newest progress.
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
        """Logprobs from the first of `_tokens` on; None if the request did not ask for them."""
        self._num_logprobs = before.num_tokens
        """Number of output tokens up to the last one that got its logprobs."""
        self._end: StreamEnd | None = None
        self.stream_id = stream_id
        self.choice = choice
        self.is_over = before.is_over
        self.num_received = before.num_tokens
        self.progress: StreamProgress | None = None

    def put_tokens(self, offset: int, token_ids: bytes) -> None:
        """
        Add output tokens; those that were received before are ignored.

        Args:
            offset: Output offset of the first token.
            token_ids: int32 ids.
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
        """Deliver tokens from now on only together with their logprobs."""
        self._logprobs = []

    def put_logprob(self, offset: int, logprob: TokenLogprob) -> None:
        """
        Add the logprobs of the token at an output offset; repeated ones are ignored. A negative
        offset is that of a prompt token.
        """
        inbox = self._inbox
        if offset < 0:
            inbox.put_score(offset, logprob)
            return
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
        if self._inbox.on_progress is not None:
            self._inbox.on_progress(self.choice, progress)
        self._inbox.note_progress(self)

    def put_end(self, end: StreamEnd) -> None:
        """Note that the choice ended with a finish reason."""
        self.is_over = True
        if self._logprobs is not None and self._num_logprobs < self.num_received:
            self._fail(f"the log probabilities of output token {self._num_logprobs} were lost")
            return
        self._end = end
        self._inbox.scores.release()
        self._note_news()

    def put_failure(self, error: TandemError) -> None:
        """Note that the choice failed, and with it the request."""
        self.is_over = True
        self._inbox.put_failure(error)

    def take(self) -> ChoiceNews:
        """
        Return and clear the news of this choice; tokens without their logprobs stay, and tokens
        beyond what one message may have.
        """
        if len(self._tokens) > self._inbox.max_taken:
            return self._take_first()
        tokens, logprobs, end = self._tokens, self._logprobs, self._end
        self._has_news, self._tokens, self._end = False, array("i"), None
        if logprobs is None:
            return ChoiceNews(self.choice, tokens.tolist(), end)
        count = min(len(tokens), len(logprobs))
        self._tokens, self._logprobs = tokens[count:], logprobs[count:]
        return ChoiceNews(self.choice, tokens[:count].tolist(), end, logprobs[:count])

    def _take_first(self) -> ChoiceNews:
        """Return as much as one message may have; the rest, and the end, are still news."""
        logprobs, count = self._logprobs, self._inbox.max_taken
        self._has_news = False
        if logprobs is not None:
            count = min(count, len(logprobs))
            self._logprobs = logprobs[count:]
        news = ChoiceNews(
            self.choice, self._tokens[:count].tolist(), None, logprobs and logprobs[:count]
        )
        self._tokens = self._tokens[count:]
        self._inbox.num_left_bytes += len(self._tokens) * BYTES_PER_TOKEN
        if self._end is not None or logprobs is None or self._logprobs:
            self._note_news()
        return news

    def _note_news(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._inbox.with_news.append(self)
            self._wake()

    def _fail(self, what: str) -> None:
        self._inbox.put_failure(InternalError(f"{what} between core and frontend"))

    def _unseen(self, offset: int, token_ids: bytes) -> bytes:
        """Return the tokens that are new; note a failure if there is a gap before them."""
        num_seen = self.num_received - offset
        if num_seen < 0 and not self._inbox.is_closed:
            self._fail(f"output token {self.num_received} was lost")
        return b"" if self._inbox.is_closed else token_ids[num_seen * BYTES_PER_TOKEN :]


class StreamInbox:
    """
    Inbox of one request. Owned by the event loop: the reader of the core's socket puts, the
    request's task takes.

    Putting never waits. News that the task has not taken yet is merged, so a slow client costs 4
    bytes for each id that it has not read, and at most `max_pending_bytes` over all choices. Past
    that, or when one message waits too long for the client, this request ends with `SlowConsumer`.

    Attributes:
        choices: Inbox of each choice, with consecutive stream numbers.
        accepted: The core's answer that it accepted the request; None until then.
        last_sent_s: Time at which the client last took a message; see `sweep`.
        num_pending_bytes: Size of the output of all choices that was not taken yet.
        max_pending_bytes: Limit of that size.
        max_taken: Most tokens of a choice that are taken together.
        num_left_bytes: Size of tokens that the last `take` left for the next one.
        is_closed: True once further output is ignored.
        wake: Wakes the request's task when something arrived.
        with_news: Choices with news that was not taken yet.
        scores: Log probabilities of the prompt, before which no output is taken.
        on_progress: Is told the choice of each progress, with it; None where no one asks.
    """

    def __init__(
        self,
        first_stream_id: int,
        *,
        before: Sequence[Received] = (Received(),),
        with_logprobs: bool = False,
        with_scores: bool = False,
        max_pending_bytes: int,
        now_s: float,
        turns: StreamTurns | None = None,
        bell: ItemBell | None = None,
    ) -> None:
        self._something = bell or Bell(turns or StreamTurns())
        self._shared = None if bell is None else bell.write
        self.max_taken = (
            sys.maxsize if bell is None else bell.max_taken(with_logprobs=with_logprobs)
        )
        self.num_left_bytes = 0
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
        self.scores = PromptScores(is_complete=not with_scores)
        self.accepted: Accepted | None = None
        self.on_progress: Callable[[int, StreamProgress], None] | None = None
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
        """True once the request was accepted and all its choices are over."""
        return self.accepted is not None and all(choice.is_over for choice in self.choices)

    @property
    def is_over(self) -> bool:
        """True once nothing more comes: all choices are over, or the request failed."""
        return self.is_closed or all(choice.is_over for choice in self.choices)

    def accept(self, accepted: Accepted) -> None:
        """Note that the core accepted the request."""
        self.accepted = accepted
        self._something.ring()

    def refuse(self, error: TandemError) -> None:
        """End all choices with an error: the core refused the request, or is gone."""
        for choice in self.choices:
            choice.is_over = True
        self.put_failure(error)

    def put_failure(self, error: TandemError) -> None:
        """Fail the request; the first failure stays."""
        self.is_closed = True
        if self._news.failure is None:
            self._news.failure = error
        self._something.ring()

    async def wait(self) -> None:
        """Wait until there is news and it is this stream's turn."""
        await self._something.wait()

    def take(self) -> News:
        """Return all news since the last call."""
        news, self._news = self._news, News()
        news.scores = self.scores.take()
        if not self.scores.is_complete:
            return news
        with_news, self.with_news, self.num_left_bytes = self.with_news, [], 0
        news.choices = [choice.take() for choice in with_news]
        self.num_pending_bytes = self.num_left_bytes
        return news

    def put_score(self, offset: int, entry: TokenLogprob) -> None:
        """Add the log probabilities of the prompt token at a negative offset."""
        if not self.is_closed:
            self.scores.put(offset, entry)
            self._something.ring()

    def begin_write(self, now_s: float) -> None:
        """Note that the calling task starts to wait for the client to take a message."""
        self._write_began_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self, now_s: float) -> None:
        """Note that the client took the message."""
        self._write_began_s = None
        self.last_sent_s = now_s

    @property
    def slow(self) -> SlowConsumer | None:
        """Error that is set when the writing task was cancelled because the client is too slow."""
        return self._slow

    def sweep(self, now_s: float, *, stall_deadline_s: float, progress_interval_s: float) -> None:
        """Wake a silent stream and end a stalled one; called at regular intervals."""
        if self._shared is not None and self._shared.is_writing:
            return
        if self._write_began_s is None:
            if now_s - self.last_sent_s >= progress_interval_s:
                self._news.is_silent = True
                self._something.ring()
        elif now_s - self._write_began_s >= stall_deadline_s:
            self._give_up(f"a message waited {stall_deadline_s:g} s for the client")

    def forgive(self, seconds: float) -> None:
        """Leave `seconds` out of all timeouts, as this process itself stood still then."""
        self.last_sent_s += seconds
        if self._write_began_s is not None:
            self._write_began_s += seconds

    def give_up_if_slow(self) -> None:
        """End the request with `SlowConsumer` if its task is waiting for the client."""
        why = f"{self.num_pending_bytes:,} bytes of output wait for the client"
        if self._shared is not None and self._shared.is_writing:
            self.put_failure(slow_consumer(why))
        elif self._write_began_s is not None:
            self._give_up(why)

    def note_progress(self, choice: ChoiceInbox) -> None:
        """Note a choice's progress; only that of the first choice that is not over is sent."""
        if choice is self._leader():
            unsent = self._news.progress
            # The number of cached tokens is reported only once, prefill progress again and again.
            if unsent is None or unsent.kind != ProgressKind.SCHEDULED:
                self._news.progress = choice.progress
            self._something.ring()

    def _leader(self) -> ChoiceInbox | None:
        return next((choice for choice in self.choices if not choice.is_over), None)

    def _give_up(self, why: str) -> None:
        if self._slow is not None or self._writer is None:
            return
        self.is_closed = True
        self._slow = slow_consumer(why)
        self._writer.cancel()
