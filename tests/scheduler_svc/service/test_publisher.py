import numpy as np
import pytest

from scheduler_svc.core.request.events import CoreEvents, Ended, Failed, Progress, ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc.messages import Accepted, CoreMessage, StreamProgress, Update
from scheduler_svc.ipc.sockets import FrontendGone
from scheduler_svc.ipc.token_run import MAX_RUN_BYTES
from scheduler_svc.service.publisher import (
    MAX_SPLITS,
    RETRY_S,
    Publisher,
    frontend_of,
    handle_of,
    stream_of,
)
from tandem.errors import NeverFits
from tests.scheduler_svc.service.token_rows import token_rows


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[tuple[int, CoreMessage]] = []
        self.full: set[int] = set()
        self.gone: set[int] = set()
        self.room: dict[int, int] = {}
        """Number of messages that a pipe takes before it is full."""
        self.num_attempts = 0

    def try_send(self, index: int, message: CoreMessage) -> bool:
        self.num_attempts += 1
        if index in self.gone:
            raise FrontendGone
        if index in self.full:
            return False
        if index in self.room:
            self.room[index] -= 1
            if not self.room[index]:
                self.full.add(index)
        self.sent.append((index, message))
        return True


@pytest.fixture
def sender() -> FakeSender:
    return FakeSender()


@pytest.fixture
def publisher(sender) -> Publisher:
    publisher = Publisher(sender)
    publisher.open(0)
    publisher.open(1)
    return publisher


def _tokens(*rows: tuple[int, int, int, int]) -> CoreEvents:
    """Return events of (frontend, stream, offset, token) rows."""
    return CoreEvents(
        token_handle=np.array([handle_of(f, s) for f, s, _, _ in rows], np.int64),
        token_offset=np.array([row[2] for row in rows], np.int32),
        token=np.array([row[3] for row in rows], np.int32),
    )


def _ended(frontend: int, stream: int, num_tokens: int) -> Ended:
    return Ended(
        handle=handle_of(frontend, stream),
        reason=FinishReason.MAX_TOKENS,
        matched_token=None,
        num_prompt_tokens=1,
        num_output_tokens=num_tokens,
        num_cached_tokens=0,
        queue_s=0.0,
        first_token_s=0.0,
        total_s=1.0,
        num_preemptions=0,
    )


class TestHandles:
    @pytest.mark.parametrize("frontend", [0, 1, 63])
    @pytest.mark.parametrize("stream", [0, 1, 2**32 - 1])
    def test_handle_holds_frontend_and_stream(self, frontend, stream):
        """A handle is an int64 that gives back the frontend and its own number."""
        handle = handle_of(frontend, stream)
        assert (frontend, stream) == (frontend_of(handle), stream_of(handle))
        assert handle == np.int64(handle)


class TestPublisher:
    @pytest.mark.parametrize("frontends", [(0, 0, 0), (0, 1, 0)])
    def test_same_requests_step_after_step(self, publisher, sender, frontends):
        """Tokens of one version of the column of handles are split alike at every step."""
        for offset in (3, 4):
            events = _tokens(*((f, s, offset, 10 * offset + s) for s, f in enumerate(frontends)))
            events.token_version = 7
            publisher.add(events)
            publisher.flush(0.0)

        for offset in (3, 4):
            for frontend in set(frontends):
                mine = [s for s, f in enumerate(frontends) if f == frontend]
                index, update = sender.sent.pop(0)
                assert frontend == index
                assert [(s, offset, 10 * offset + s) for s in mine] == token_rows(update)

    @pytest.mark.parametrize("versions", [(0, 0), (7, 0), (7, 8), (0, 7)])
    def test_changed_column_of_handles_is_read_again(self, publisher, sender, versions):
        """A column of handles without a version, or under another one, is read anew."""
        events = _tokens((0, 1, 0, 11))
        events.token_version = versions[0]
        publisher.add(events)
        events.token_handle[0] = handle_of(1, 2)
        events.token_version = versions[1]
        publisher.add(events)
        publisher.flush(0.0)
        assert [(0, [(1, 0, 11)]), (1, [(2, 0, 11)])] == [
            (i, token_rows(u)) for i, u in sender.sent
        ]

    def test_requests_that_take_turns(self, publisher, sender):
        """Columns of handles of several versions in turn, as of lanes, are each split right."""
        for offset in range(2 * MAX_SPLITS):
            for stream, version in ((1, 7), (2, 8), (3, 100 + offset)):
                events = _tokens((0, stream, offset, 11))
                events.token_version = version
                publisher.add(events)
                publisher.flush(0.0)
                assert [(0, [(stream, offset, 11)])] == [(i, token_rows(u)) for i, u in sender.sent]
                sender.sent.clear()

    def test_one_update_per_frontend_and_step(self, publisher, sender):
        """One turn's tokens are split by frontend, in order, into one message each."""
        publisher.add(_tokens((1, 7, 0, 11), (0, 7, 3, 12), (1, 2**32 - 1, 5, 13)))
        publisher.flush(0.0)
        assert [0, 1] == [index for index, _ in sender.sent]
        assert [(7, 3, 12)] == token_rows(sender.sent[0][1])
        assert [(7, 0, 11), (2**32 - 1, 5, 13)] == token_rows(sender.sent[1][1])

    def test_nothing_new_sends_nothing(self, publisher, sender):
        """A turn without events sends no message."""
        publisher.flush(0.0)
        assert 0 == sender.num_attempts

    def test_full_pipe_merges_into_the_next_message(self, publisher, sender):
        """Messages that a pipe does not take follow in one message with later ones, in order."""
        sender.full = {0}
        for offset in range(3):
            publisher.add(_tokens((0, 7, offset, 20 + offset), (1, 7, offset, 30 + offset)))
            publisher.flush(offset * RETRY_S)
        assert publisher.has_unsent
        assert 3 == len(sender.sent)
        sender.full = set()
        publisher.flush(10.0)
        assert [(7, 0, 20), (7, 1, 21), (7, 2, 22)] == token_rows(sender.sent[-1][1])
        assert not publisher.has_unsent
        assert 2 == publisher.num_merged

    def test_long_lag_costs_messages_of_bounded_size(self, publisher, sender):
        """
        Tokens after a long lag come in several messages of bounded size, the ends in the last.
        """
        sender.full = {0}
        streams, steps = 512, 400
        handles = np.array([handle_of(0, stream) for stream in range(streams)], np.int64)
        for step in range(steps):
            column = np.full(streams, step, np.int32)
            publisher.add(CoreEvents(token_handle=handles, token_offset=column, token=column))
        publisher.add(CoreEvents(ended=[_ended(0, 5, steps)]))
        publisher.flush(0.0)
        sender.full = set()
        publisher.flush(1.0)
        updates = [update for _, update in sender.sent]
        assert all(len(update.token) <= MAX_RUN_BYTES for update in updates)
        assert steps * streams * 4 == sum(len(update.token) for update in updates)
        assert [0] * (len(updates) - 1) + [1] == [len(update.ended) for update in updates]
        rows = [row for update in updates for row in token_rows(update) if row[0] == 5]
        assert [(5, step, step) for step in range(steps)] == rows

    def test_pipe_that_fills_up_again_keeps_the_rest(self, publisher, sender):
        """Messages held back that a pipe again does not take follow later, once."""
        sender.full = {0}
        for offset, stream in enumerate((7, 8, 9)):
            publisher.add(_tokens((0, stream, offset, 5)))
        publisher.add(CoreEvents(ended=[_ended(0, 9, 3)]))
        publisher.flush(0.0)
        sender.room = {0: 2}
        sender.full = set()
        publisher.flush(1.0)
        assert [[(7, 0, 5)], [(8, 1, 5)]] == [token_rows(update) for _, update in sender.sent]
        assert publisher.has_unsent
        sender.room, sender.full = {}, set()
        publisher.flush(2.0)
        assert [(9, 2, 5)] == token_rows(sender.sent[-1][1])
        assert [0, 0, 1] == [len(update.ended) for _, update in sender.sent]
        assert not publisher.has_unsent

    def test_full_pipe_is_not_tried_at_every_step(self, publisher, sender):
        """A full pipe costs one attempt per retry interval, however many steps there are."""
        sender.full = {0}
        for step in range(100):
            publisher.add(_tokens((0, 7, step, 5)))
            publisher.flush(0.001 * RETRY_S * step)
        assert 1 == sender.num_attempts

    def test_answers_come_before_updates(self, publisher, sender):
        """A request is accepted before its first token is sent, also after a full pipe."""
        sender.full = {0}
        publisher.answer(0, Accepted(7))
        publisher.add(_tokens((0, 7, 0, 1)))
        publisher.flush(0.0)
        publisher.answer(0, Accepted(8))
        publisher.add(_tokens((0, 8, 0, 2)))
        sender.full = set()
        publisher.flush(1.0)
        kinds = [type(message) for _, message in sender.sent]
        assert [Accepted, Accepted, Update, Update] == kinds

    def test_progress_held_back_keeps_the_newest(self, publisher, sender):
        """The last of several places in the queue is the only one sent."""
        sender.full = {0}
        for place in (5, 4, 3):
            progress = Progress(handle=handle_of(0, 7), kind=ProgressKind.QUEUED, value=place)
            publisher.add(CoreEvents(progress=[progress]))
            publisher.flush(0.0)
        sender.full = set()
        publisher.flush(1.0)
        (sent,) = sender.sent
        assert (StreamProgress(7, 1, 3),) == sent[1].progress

    def test_error_travels_with_all_its_parts(self, publisher, sender):
        """A failed request's reason, text, field and facts reach its frontend."""
        error = NeverFits("too much", field="prompt", metadata={"limit": "max_num_blocks"})
        publisher.add(CoreEvents(failed=[Failed(handle=handle_of(1, 9), error=error)]))
        publisher.flush(0.0)
        (failed,) = sender.sent[0][1].failed
        assert (9, "NEVER_FITS", "too much", "prompt", {"limit": "max_num_blocks"}) == (
            failed.stream_id,
            failed.reason,
            failed.message,
            failed.field,
            failed.metadata,
        )

    def test_gone_frontend_is_reported_once_and_dropped(self, publisher, sender):
        """A frontend that cannot be reached is reported once; its later events go nowhere."""
        sender.gone = {0}
        publisher.add(_tokens((0, 7, 0, 1)))
        assert [0] == list(publisher.flush(0.0))
        publisher.add(_tokens((0, 7, 1, 1)))
        assert [] == list(publisher.flush(1.0))
        assert [1] == publisher.frontends
        assert [] == sender.sent
