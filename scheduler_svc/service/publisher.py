"""
Output of the core: one message per step and frontend, sent without ever waiting for a frontend.

Messages that a full pipe does not take stay in that frontend's outbox and are merged with later
ones. The size of an outbox is bounded by what its frontend asked for: one answer per query, each
token of each of its live requests once (4 bytes, as in the core's own history of the request), and
the log probabilities that were asked for. Trying a full pipe again costs one message of limited
size, whatever the size of the outbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.events import CoreEvents, Ended, TokenLogprobs
from scheduler_svc.ipc.messages import (
    CoreMessage,
    Refused,
    StreamEnd,
    StreamLogprobs,
    StreamProgress,
    Update,
)
from scheduler_svc.ipc.sockets import FrontendGone
from scheduler_svc.ipc.token_run import TokenRun
from tandem.errors import TandemError
from tandem.link import MAX_STAGES
from tandem.link.batch import Int32Column

RETRY_S = 0.01
MAX_LOGPROB_BYTES = 64 * 1024
"""
Limit of the stream numbers and top logprobs of one message, in bytes; one step that has more is
still sent as one message.
"""
MAX_SPLITS = 4 * MAX_STAGES
"""
Most columns of handles whose split is kept: those of lanes of all executors, and former ones. With
more lanes in all each is split again, which is slower and as right.
"""
STREAM_BITS = 32
_STREAM_MASK = (1 << STREAM_BITS) - 1


def handle_of(frontend: int, stream_id: int) -> int:
    """Return the core's number (handle) of a frontend's stream."""
    return frontend << STREAM_BITS | stream_id


def frontend_of(handle: int) -> int:
    """Return the index of the frontend to which a handle belongs."""
    return handle >> STREAM_BITS


def stream_of(handle: int) -> int:
    """Return the frontend's own number of the stream with this handle."""
    return handle & _STREAM_MASK


def refusal(stream_id: int, error: TandemError) -> Refused:
    """Return an error in the form that frontends get."""
    return Refused(
        stream_id=stream_id,
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        metadata=error.metadata,
    )


class Sender(Protocol):
    """Part of `ipc.sockets.CoreSocket` that the publisher uses."""

    def try_send(self, index: int, message: CoreMessage) -> bool:
        """Send without waiting; return False when the pipe is full. Raises FrontendGone."""


_Split: TypeAlias = list[tuple[int, NDArray[np.bool_] | None, bytes]]
"""Per frontend: index, mask of its entries in a column (None: all), their uint32 stream numbers."""


class _Outbox:
    """Messages that have not been sent to one frontend yet."""

    def __init__(self) -> None:
        self.answers: deque[CoreMessage] = deque()
        """Messages other than Updates, oldest first."""
        self.runs: deque[TokenRun] = deque()
        """Runs of output tokens, oldest first; ends, failures and progress are sent after them."""
        self.logprobs: deque[StreamLogprobs] = deque()
        """Logprobs of the requests that asked for them, oldest first; sent before any end."""
        self.ended: list[StreamEnd] = []
        self.failed: list[Refused] = []
        self.progress: dict[tuple[int, int], StreamProgress] = {}
        """Newest progress by stream and kind; an older one of the same kind is not sent."""

    def add_tokens(self, streams: bytes, offsets: Int32Column, tokens: bytes) -> bool:
        """Add one step's tokens; return True when older ones are still unsent."""
        runs = self.runs
        if runs:
            if not runs[-1].try_extend(streams, offsets, tokens):
                runs.append(TokenRun(streams, offsets, tokens))
            return True
        runs.append(TokenRun(streams, offsets, tokens))
        return False

    def has_update(self) -> bool:
        return bool(self.runs or self.ended or self.failed or self.progress or self.logprobs)

    def next_update(self) -> Update:
        """
        Return the oldest run of tokens and the oldest logprobs, with ends, failures and progress if
        no run or logprobs remain after this message.
        """
        update = self.runs[0].update() if self.runs else Update()
        if self.logprobs:
            update = msgspec.structs.replace(update, logprobs=self._next_logprobs())
        if (
            len(self.runs) > 1
            or len(update.logprobs) < len(self.logprobs)
            or not (self.ended or self.failed or self.progress)
        ):
            return update
        return msgspec.structs.replace(
            update,
            ended=tuple(self.ended),
            failed=tuple(self.failed),
            progress=tuple(self.progress.values()),
        )

    def drop(self, update: Update) -> None:
        """Drop what `next_update` returned, after it was sent."""
        for _ in update.logprobs:
            self.logprobs.popleft()
        if len(self.runs) <= 1 and not self.logprobs:
            self.ended.clear()
            self.failed.clear()
            self.progress.clear()
        if self.runs:
            self.runs.popleft()

    def _next_logprobs(self) -> tuple[StreamLogprobs, ...]:
        """Return the oldest logprobs, as many as one message takes and at least one."""
        num_bytes = 0
        chosen: list[StreamLogprobs] = []
        for one in self.logprobs:
            num_bytes += len(one.stream) + len(one.top)
            if chosen and num_bytes > MAX_LOGPROB_BYTES:
                break
            chosen.append(one)
        return tuple(chosen)


class Publisher:
    """
    Outboxes of all frontends. Owned by the core loop.

    Attributes:
        num_merged: Number of times that one step's tokens for a frontend were added to older ones
            that a full pipe had held back.
    """

    def __init__(self, sender: Sender) -> None:
        """
        Args:
            sender: Sends the messages.
        """
        self._sender = sender
        self._outboxes: dict[int, _Outbox] = {}
        self._retry_s: dict[int, float] = {}
        """Time of the next attempt by frontend, for each full pipe."""
        self._splits: dict[int, _Split] = {}
        """Split of each version of a column of handles that came lately."""
        self.num_merged = 0

    @property
    def frontends(self) -> list[int]:
        """Indices of all connected frontends."""
        return list(self._outboxes)

    @property
    def has_unsent(self) -> bool:
        """True while a full pipe holds messages back; call `flush` again soon."""
        return bool(self._retry_s)

    def open(self, frontend: int) -> None:
        """Give a frontend that connected an empty outbox."""
        self._outboxes[frontend] = _Outbox()
        self._retry_s.pop(frontend, None)

    def close(self, frontend: int) -> None:
        """Drop a frontend's outbox; later events of its requests are dropped too."""
        self._outboxes.pop(frontend, None)
        self._retry_s.pop(frontend, None)

    def answer(self, frontend: int, message: CoreMessage) -> None:
        """Queue a message other than an Update; it overtakes tokens that are still held back."""
        outbox = self._outboxes.get(frontend)
        if outbox is not None:
            outbox.answers.append(message)

    def offer(self, frontend: int, message: CoreMessage) -> None:
        """Queue a message that may be lost; a full pipe that holds others back has no room."""
        if frontend not in self._retry_s:
            self.answer(frontend, message)

    def answer_all(self, message: CoreMessage) -> None:
        """Queue a message other than an Update for every frontend."""
        for outbox in self._outboxes.values():
            outbox.answers.append(message)

    def add(self, events: CoreEvents) -> None:
        """Add the core's events to the outboxes of their frontends."""
        if len(events.token):
            self._add_tokens(events)
        for logprobs in events.logprobs:
            self._add_logprobs(logprobs)
        for end in events.ended:
            if outbox := self._outboxes.get(frontend_of(end.handle)):
                outbox.ended.append(_stream_end(end))
        for failure in events.failed:
            if outbox := self._outboxes.get(frontend_of(failure.handle)):
                outbox.failed.append(refusal(stream_of(failure.handle), failure.error))
        for progress in events.progress:
            self.add_progress(progress.handle, int(progress.kind), progress.value)

    def add_progress(self, handle: int, kind: int, value: int) -> None:
        """Queue a request's progress, such as its place in the waiting queue."""
        stream = stream_of(handle)
        if outbox := self._outboxes.get(frontend_of(handle)):
            outbox.progress[stream, kind] = StreamProgress(stream, kind, value)

    def flush(self, now: float) -> Sequence[int]:
        """
        Send what pipes take; a full one is tried again after `RETRY_S`, not at every step. Returns
        the frontends that are found gone, of which the outboxes were dropped.
        """
        retry_s = self._retry_s
        gone: Sequence[int] = ()
        for frontend, outbox in list(self._outboxes.items()):
            if retry_s and retry_s.get(frontend, 0.0) > now:
                continue
            try:
                is_empty = self._flush_one(frontend, outbox)
            except FrontendGone:
                self.close(frontend)
                gone = (*gone, frontend)
                continue
            if not is_empty:
                retry_s[frontend] = now + RETRY_S
            elif retry_s:
                retry_s.pop(frontend, None)
        return gone

    def _flush_one(self, frontend: int, outbox: _Outbox) -> bool:
        while outbox.answers:
            if not self._sender.try_send(frontend, outbox.answers[0]):
                return False
            outbox.answers.popleft()
        while outbox.has_update():
            update = outbox.next_update()
            if not self._sender.try_send(frontend, update):
                return False
            outbox.drop(update)
        return True

    def _add_tokens(self, events: CoreEvents) -> None:
        offset, token = events.token_offset, events.token
        for frontend, mine, streams in self._split(events.token_handle, events.token_version):
            outbox = self._outboxes.get(frontend)
            if outbox is None:
                continue
            offsets = offset if mine is None else offset[mine]
            tokens = (token if mine is None else token[mine]).tobytes()
            self.num_merged += outbox.add_tokens(streams, offsets, tokens)

    def _add_logprobs(self, logprobs: TokenLogprobs) -> None:
        owner = logprobs.handle >> STREAM_BITS
        for frontend in np.unique(owner).tolist():
            outbox = self._outboxes.get(frontend)
            if outbox is None:
                continue
            mine = owner == frontend
            columns = logprobs.columns.select(mine)
            outbox.logprobs.append(
                StreamLogprobs(
                    stream=logprobs.handle[mine].astype(np.uint32).tobytes(),
                    offset=logprobs.offset[mine].tobytes(),
                    chosen=columns.chosen.tobytes(),
                    top_start=columns.top_start.tobytes(),
                    top_token=columns.top_token.tobytes(),
                    top=columns.top.tobytes(),
                    rank=b"" if logprobs.rank is None else logprobs.rank[mine].tobytes(),
                )
            )

    def _split(self, handle: NDArray[np.int64], version: int) -> _Split:
        """
        Split the entries of a column of handles by frontend.

        Most steps produce tokens for the same requests as the step before. The column then has the
        same version, other than 0, and its split is returned again; so for each executor and lane.
        """
        if version and (known := self._splits.get(version)) is not None:
            return known
        stream = handle.astype(np.uint32)  # the low 32 bits
        owner = handle >> STREAM_BITS
        first = int(owner[0])
        if (owner == first).all():
            split: _Split = [(first, None, stream.tobytes())]
        else:
            owners = [(frontend, owner == frontend) for frontend in np.unique(owner).tolist()]
            split = [(frontend, mine, stream[mine].tobytes()) for frontend, mine in owners]
        if version:
            if len(self._splits) == MAX_SPLITS:  # of rows that changed, all but a few
                self._splits.clear()
            self._splits[version] = split
        return split


def _stream_end(end: Ended) -> StreamEnd:
    return StreamEnd(
        stream_id=stream_of(end.handle),
        reason=int(end.reason),
        matched_token=end.matched_token,
        num_prompt_tokens=end.num_prompt_tokens,
        num_output_tokens=end.num_output_tokens,
        num_cached_tokens=end.num_cached_tokens,
        queue_s=end.queue_s,
        first_token_s=end.first_token_s,
        total_s=end.total_s,
        num_preemptions=end.num_preemptions,
    )
