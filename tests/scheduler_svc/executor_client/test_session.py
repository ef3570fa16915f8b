"""Events of a session, as the loop takes them, without a loop and a core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.executor_client.link_events import SessionOpened, StreamMessage
from scheduler_svc.executor_client.session import ExecutorSession
from scheduler_svc.executor_client.session_events import ExecutorSeen, SessionEnded
from tandem.errors import SessionLost
from tandem.link.batch import ROW_SAMPLES, Batch
from tandem.link.results import StepResult
from tandem.link.session import Attached, LossCause
from tests.scheduler_svc.service.fakes.fake_link import describe

NONE = np.zeros(0, np.int32)


class SilentLink:
    """A link that notes what it is asked for, in order, and never answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_streams = 0

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        self.asked.append("attach")
        self.num_streams += 1
        return self.num_streams

    def send(self, raw_step: bytes) -> None:
        self.asked.append("send")

    def connect(self, delay_s: float = 0.0, *, elsewhere: bool = False) -> None:
        self.asked.append("connect")

    def seek(self, *, may_move: bool) -> None:
        self.asked.append("seek")

    def break_stream(self) -> None:
        self.asked.append("break")

    def release(self) -> None:
        self.asked.append("release")


@pytest.fixture
def link() -> SilentLink:
    return SilentLink()


@pytest.fixture
def session(link) -> ExecutorSession:
    return ExecutorSession(link, lost_after_s=30.0, now=0.0)


def opened(boot_id: str = "boot-1", address: str = "fake:1", epoch: int = 1) -> SessionOpened:
    return SessionOpened(
        description=describe(boot_id),
        tokenizer_dir=Path("/none"),
        session_epoch=epoch,
        address=address,
    )


def taken(session: ExecutorSession) -> list[object]:
    """Take all events, as the loop does."""
    events = list(session.events)
    session.events.clear()
    return events


def attach(session: ExecutorSession, boot_id: str = "boot-1", address: str = "fake:1") -> None:
    """Bring a session to where steps flow."""
    session.take(opened(boot_id, address), 0.0)
    session.attach()
    answer = Attached(boot_id=boot_id, last_received_step_id=0, last_completed_step_id=0)
    session.take(StreamMessage(stream=session._stream, message=answer), 0.0)
    assert session.is_attached
    session.events.clear()


def send(session: ExecutorSession, now: float = 0.0) -> Batch:
    batch = Batch(
        row_slot=np.zeros(1, np.int32),
        row_start=np.zeros(1, np.int32),
        row_num_tokens=np.ones(1, np.int32),
        row_flags=np.array([ROW_SAMPLES], np.uint8),
    )
    session.send(batch, 1, now)
    return batch


def result_of(session: ExecutorSession, step_id: int) -> StreamMessage:
    result = StepResult(
        boot_id="boot-1",
        step_id=step_id,
        slot=NONE,
        generation=NONE.astype(np.uint32),
        position=NONE,
        token=NONE,
    )
    return StreamMessage(stream=session._stream, message=result)


class TestOpening:
    def test_stream_is_opened_only_once_the_loop_asks_for_it(self, session, link):
        """A session that was opened is an event, and its first stream waits until the core is ready."""
        session.take(opened(), 0.0)
        assert [opened()] == taken(session)
        assert [] == link.asked
        session.attach()
        assert ["attach"] == link.asked

    def test_work_that_moves_ends_one_session_before_the_next_opens(self, session):
        """An executor that takes the work over is told after the end of the session before."""
        attach(session)
        session.take(opened("boot-2", "fake:2"), 0.0)
        moved = SessionEnded(cause=LossCause.MOVED, died_in=None, may_live="boot-1")
        assert [moved, opened("boot-2", "fake:2")] == taken(session)

    def test_executor_that_opens_another_session_is_told_alive(self, session):
        """Between the end of one session and the next one of the same boot, that executor is told to live."""
        attach(session)
        session.take(opened(epoch=2), 0.0)
        moved = SessionEnded(cause=LossCause.MOVED, died_in=None, may_live="boot-1")
        alive = ExecutorSeen(boot_id="boot-1", died=False)
        assert [moved, alive, opened(epoch=2)] == taken(session)

    def test_session_that_was_granted_before_is_given_up(self, session, link):
        """An executor that grants the number of an earlier session breaks the protocol: another session is asked for."""
        attach(session)
        session.take(opened(epoch=2), 0.0)
        taken(session)
        session.take(opened(epoch=1), 0.0)
        *_, ended = taken(session)
        assert SessionEnded(cause=LossCause.PROTOCOL, died_in=None, may_live="") == ended
        assert "connect" == link.asked[-1]
        session.take(opened(epoch=3), 0.0)
        assert opened(epoch=3) in taken(session)


class TestResults:
    def test_result_is_the_event_and_leaves_flight_once_applied(self, session):
        """A step's result is passed on as it is, with its time; its step is in flight until it was applied."""
        attach(session)
        batch = send(session, now=1.0)
        message = result_of(session, 1)
        session.take(message, 1.25)
        (event,) = taken(session)
        assert message.message is event
        assert 0.25 == session.last_step_s
        assert [1] == list(session._in_flight)
        assert batch is session.step_applied(1)
        assert {} == session._in_flight

    def test_duplicate_is_no_event(self, session):
        """A result that comes twice is passed on once."""
        attach(session)
        send(session)
        for _ in range(2):
            session.take(result_of(session, 1), 0.0)
        assert 1 == len(taken(session))


class TestLosing:
    def test_loop_gives_up_a_session_whose_result_does_not_fit(self, session, link):
        """A session lost by the loop ends as one lost by the executor does, with the cause that the error names."""
        attach(session)
        send(session)
        session.take(result_of(session, 1), 0.0)
        taken(session)
        link.asked.clear()
        session.lose(SessionLost("not of this batch"), 0.0)
        ended = SessionEnded(cause=LossCause.PROTOCOL, died_in=None, may_live="")
        assert [ended] == taken(session)
        assert ["break", "connect"] == link.asked
        assert not session.can_send

    def test_step_whose_result_was_refused_can_be_blamed(self, session):
        """A step is in flight while its result is applied, so the loss may be blamed on it."""
        attach(session)
        for _ in range(2):
            send(session)
        session.take(result_of(session, 1), 0.0)
        taken(session)
        error = SessionLost("a new boot", metadata=LossCause.NEW_BOOT.as_metadata())
        session.lose(error, 0.0)
        assert [0] == [event.died_in for event in taken(session)]

    def test_fate_of_a_silent_executor_is_told_before_the_next_session(self, session):
        """Where another boot answers at the address of a silent one, its death is told before the new session."""
        attach(session)
        send(session)
        for second in range(40):
            session.look(float(second))
        (ended,) = taken(session)
        assert (LossCause.SILENT, 0, "boot-1") == (ended.cause, ended.died_in, ended.may_live)
        session.take(opened("boot-2"), 40.0)
        assert [ExecutorSeen(boot_id="boot-1", died=True), opened("boot-2")] == taken(session)

    def test_released_session_tells_nothing_more(self, session, link):
        """After the executor was given back, nothing of the link or of silence is an event."""
        attach(session)
        send(session)
        session.release(0.0)
        session.take(result_of(session, 1), 0.0)
        for second in range(100):
            session.look(float(second))
        assert [] == taken(session)
        assert "release" == link.asked[-1]
