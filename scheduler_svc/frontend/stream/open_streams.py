"""Open streams of a frontend: sorts the core's output into their inboxes, and times them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from scheduler_svc.frontend.stream.inbox import ChoiceInbox, Received, StreamInbox
from scheduler_svc.frontend.stream.logprob_entries import logprob_entries
from scheduler_svc.frontend.stream.shared_write import ItemBell, SharedWrite
from scheduler_svc.frontend.stream.turns import StreamTurns
from scheduler_svc.ipc.messages import Accepted, Refused, StreamLogprobs, Update
from scheduler_svc.ipc.token_run import TokenRun
from scheduler_svc.process.frontend_settings import FrontendSettings
from tandem.errors import InternalError, TandemError

MAX_STREAM_ID = 2**32 - 1


class OpenStreams:
    """
    Inboxes of the requests that have a client now. Owned by the event loop.

    Sorting never waits for a stream. Tokens of consecutive steps are kept as one run, which reaches
    the inboxes with `deliver_run`, or before progress, ends and failures.
    """

    def __init__(self, settings: FrontendSettings, clock: Callable[[], float]) -> None:
        """
        Args:
            settings: Limits of what waits for a client, and intervals.
            clock: Returns the time in seconds.
        """
        self._settings = settings
        self._clock = clock
        self._inboxes: dict[int, StreamInbox] = {}
        """Inboxes by the stream number of their choice 0."""
        self._choices: dict[int, ChoiceInbox] = {}
        """Inboxes of choices by stream number."""
        self._shared_writes: set[SharedWrite] = set()
        self._turns = StreamTurns()
        self._next_stream_id = 1
        self._run: TokenRun | None = None
        """Tokens of the last updates that were not delivered yet."""
        self._num_fed = 0
        """Number of deliveries of tokens to streams since `take_num_fed`."""

    def __len__(self) -> int:
        """Return the number of requests that have a client now."""
        return len(self._inboxes)

    @contextmanager
    def opened(
        self,
        before: Sequence[Received],
        *,
        with_logprobs: bool,
        with_scores: bool,
        bell: ItemBell | None,
    ) -> Iterator[StreamInbox]:
        """
        Keep an inbox for a request while the block runs; its choices get consecutive numbers.

        Args:
            before: Output that the client has already, one per choice.
            with_logprobs: A token is delivered only together with its log probabilities.
            with_scores: Output is delivered after the log probabilities of the prompt.
            bell: Is rung at news, on a stream that many requests share; None for one of its own.

        Raises:
            InternalError: All stream numbers were used.
        """
        stream_id = self._next_stream_id
        self._next_stream_id += len(before)
        if self._next_stream_id > MAX_STREAM_ID:
            raise InternalError("this frontend ran out of stream numbers: restart it")
        inbox = StreamInbox(
            stream_id,
            before=before,
            with_logprobs=with_logprobs,
            with_scores=with_scores,
            max_pending_bytes=self._settings.max_pending_bytes,
            now_s=self._clock(),
            turns=self._turns,
            bell=bell,
        )
        self._inboxes[stream_id] = inbox
        self._choices.update({choice.stream_id: choice for choice in inbox.choices})
        try:
            yield inbox
        finally:
            del self._inboxes[stream_id]
            for choice in inbox.choices:
                del self._choices[choice.stream_id]

    @contextmanager
    def watched(self, write: SharedWrite) -> Iterator[None]:
        """Time the writes of a stream of many requests while the block runs."""
        self._shared_writes.add(write)
        try:
            yield
        finally:
            self._shared_writes.discard(write)

    def answer(self, message: Accepted | Refused) -> None:
        """Give a request the core's answer; one without a client any more gets none."""
        inbox = self._inboxes.get(message.stream_id)
        if inbox is None:
            return
        if isinstance(message, Accepted):
            inbox.accept(message)
        else:
            inbox.refuse(message.as_error())

    def apply(self, update: Update) -> None:
        """Sort an update of the core by stream, each stream's news in order."""
        choices = self._choices
        for logprobs in update.logprobs:
            self._add_logprobs(logprobs)
        if update.token:
            self._add_tokens(update)
        if not (update.progress or update.ended or update.failed):
            return
        self.deliver_run()
        for progress in update.progress:
            if choice := choices.get(progress.stream_id):
                choice.put_progress(progress)
        for end in update.ended:
            if choice := choices.get(end.stream_id):
                choice.put_end(end)
        for failed in update.failed:
            if choice := choices.get(failed.stream_id):
                choice.put_failure(failed.as_error())

    def _add_logprobs(self, logprobs: StreamLogprobs) -> None:
        for stream, offset, entry in logprob_entries(logprobs):
            if choice := self._choices.get(stream):
                choice.put_logprob(offset, entry)

    def _add_tokens(self, update: Update) -> None:
        streams, tokens = update.token_stream, update.token
        offsets = np.frombuffer(update.token_offset, np.int32)
        if self._run is not None and self._run.try_extend(streams, offsets, tokens):
            return
        self.deliver_run()
        self._run = TokenRun(streams, offsets, tokens)

    def deliver_run(self) -> None:
        """Give streams the tokens that arrived and were not delivered yet."""
        run, self._run = self._run, None
        if run is None:
            return
        choices = self._choices
        self._num_fed += run.num_streams
        for stream_id, offset, token_ids in run.by_stream():
            if choice := choices.get(stream_id):
                choice.put_tokens(offset, token_ids)

    def take_num_fed(self) -> int:
        """Return how many streams' tokens were delivered since the last call."""
        num_fed, self._num_fed = self._num_fed, 0
        return num_fed

    def lose(self, error: TandemError) -> None:
        """End every stream that is not complete with `error`."""
        for inbox in self._inboxes.values():
            if not inbox.is_complete:
                inbox.refuse(error)

    def sweep(self, now_s: float) -> None:
        """End streams whose clients are too slow, and note who should get a sign of life."""
        for inbox in list(self._inboxes.values()):
            inbox.sweep(
                now_s,
                stall_deadline_s=self._settings.stall_deadline_s,
                progress_interval_s=self._settings.progress_interval_s,
            )
        for write in list(self._shared_writes):
            write.sweep(now_s, stall_deadline_s=self._settings.stall_deadline_s)

    def forgive(self, seconds: float) -> None:
        """Leave time in which this process stood still out of every stream's timeouts."""
        for inbox in self._inboxes.values():
            inbox.forgive(seconds)
        for write in self._shared_writes:
            write.forgive(seconds)
