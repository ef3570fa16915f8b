"""Sessions of schedulers: epochs, leases, take-over, and what opening waits for."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import structlog

from executor_svc.server.loaded import Engine
from executor_svc.server.server import ExecutorServer
from executor_svc.server.step_link import Errand, SlotReset, StepLink
from executor_svc.server.step_stream import StepStream
from tandem.errors import (
    Draining,
    IncompatibleExecutor,
    InvalidModel,
    InvalidParameter,
    SessionHeld,
    SessionLost,
    TandemError,
)
from tandem.link import step_cost
from tandem.link.batch import Batch
from tandem.link.codec.wire import encode_step
from tandem.link.commands import Step
from tandem.link.executor_end import UNATTACHED_LEASE_S
from tandem.link.results import StepResult
from tandem.link.session import Attach, SchedulerId
from tests.executor_svc.server.harness import DEADLINE_S, StepClient, refusal, wait_until

ONE, TWO = (SchedulerId(name=name, incarnation="1") for name in ("one", "two"))


class TestOpenSession:
    def test_every_opening_gets_the_next_epoch(self, executor):
        """
        The executor issues epochs 1, 2, 3, ...; the holder itself is never refused.
        """
        assert [1, 2, 3] == [executor.open_session("one") for _ in range(3)]

    def test_live_lease_refuses_another_and_names_the_holder(self, executor):
        """
        While the lease is live another scheduler gets SESSION_HELD with holder and age.
        """
        executor.open_session("one")
        error = refusal(lambda: executor.open_session("two"))
        assert isinstance(error, SessionHeld)
        assert "one" == error.metadata["holder"]
        assert int(error.metadata["age_ms"]) >= 0

    def test_who_waits_is_logged_once(self, executor):
        """
        A scheduler that asks again and again for a held session is refused with the same words, logged once.
        """
        executor.open_session("one")
        with structlog.testing.capture_logs() as logs:
            refusals = {refusal(lambda: executor.open_session("two")).message for _ in range(4)}
        assert 1 == len(refusals)
        levels = [entry["log_level"] for entry in logs if entry.get("reason") == "SESSION_HELD"]
        assert ["info", "debug", "debug", "debug"] == levels

    def test_take_over_fences_the_holder(self, executor):
        """
        With take_over the session changes hands, and the old holder's stream ends SESSION_LOST.
        """
        old = StepClient(executor, "one")
        stream = old.attach()
        assert 2 == executor.open_session("two", take_over=True)
        lost = stream.ended_with()
        assert isinstance(lost, SessionLost)
        assert ("fenced", "two") == (lost.metadata["cause"], lost.metadata["holder"])
        assert isinstance(refusal(lambda: executor.open_session("one")), SessionHeld)

    def test_restarted_scheduler_gets_the_session_of_its_dead_predecessor(self, executor):
        """
        Another incarnation of the holder's name is refused while the holder's stream is open and admitted at once when
        its connection is gone, whatever is left of the lease.
        """
        old = StepClient(executor, "one")
        stream = old.attach()
        heir = {"scheduler_incarnation": "2"}
        held = refusal(lambda: executor.open_session("one", **heir))
        assert isinstance(held, SessionHeld)
        assert 0 < int(held.metadata["lease_left_ms"]) <= 60_000
        stream.call.cancel()
        wait_until(lambda: executor.server._link._end.attach_id == 0)
        assert 2 == executor.open_session("one", **heir)
        assert isinstance(refusal(lambda: executor.open_session("one")), SessionHeld)

    def test_all_slots_are_empty_afterwards(self, executor):
        """
        A new session starts from the same state as the first: step 1 may admit slot 0 again.
        """
        first = StepClient(executor)
        tokens = [result.token.tolist() for result in first.steps(first.attach(), 3)]
        second = StepClient(executor)
        again = [result.token.tolist() for result in second.steps(second.attach(), 3)]
        assert tokens == again
        assert 2 == executor.runner.num_resets

    def test_opening_drops_queued_steps_and_waits_for_the_running_one(self, executor):
        """
        The answer comes only after the running step has ended; queued ones never run.
        """
        client = StepClient(executor)
        stream = client.attach()
        executor.runner.gate.clear()
        for _ in range(3):
            stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        wait_until(lambda: executor.server._link._end.last_received_step_id == 3)
        epochs: list[int] = []
        opener = threading.Thread(target=lambda: epochs.append(executor.open_session("one")))
        opener.start()
        assert isinstance(stream.ended_with(), SessionLost)
        assert [] == epochs
        executor.runner.gate.set()
        opener.join(DEADLINE_S)
        assert [2] == epochs
        assert [1] == executor.runner.executed

    @pytest.mark.parametrize(
        ("fields", "error", "field"),
        [
            ({"protocol_version": 99}, IncompatibleExecutor, None),
            ({"lease_ms": 999}, InvalidParameter, "lease_ms"),
            ({"lease_ms": 60_001}, InvalidParameter, "lease_ms"),
            ({"lease_ms": 2**32 - 1, "take_over": True}, InvalidParameter, "lease_ms"),
            ({"scheduler_name": ""}, InvalidParameter, "scheduler_name"),
            ({"scheduler_name": "n" * 257}, InvalidParameter, "scheduler_name"),
            ({"scheduler_incarnation": ""}, InvalidParameter, "scheduler_incarnation"),
            ({"scheduler_incarnation": "i" * 257}, InvalidParameter, "scheduler_incarnation"),
        ],
        ids=[
            "protocol",
            "short-lease",
            "long-lease",
            "lease-of-49-days",
            "no-name",
            "long-name",
            "no-incarnation",
            "long-incarnation",
        ],
    )
    def test_unusable_request_is_refused_and_changes_nothing(self, executor, fields, error, field):
        """
        Another protocol, a lease under a second or over a minute, and an identity that is empty or long are refused with its field, before any epoch is issued.
        """
        refused = refusal(lambda: executor.open_session(**{"scheduler_name": "two", **fields}))
        assert (error, field) == (type(refused), refused.field)
        assert 1 == executor.open_session()


class TestStop:
    def test_running_step_ends_and_its_result_is_sent_before_the_stream_ends(self, executor):
        """
        Stopping lets the running step finish, drops queued ones, and ends the stream DRAINING after the last result.
        """
        client = StepClient(executor)
        stream = client.attach()
        executor.runner.gate.clear()
        for _ in range(2):
            stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        stopper = threading.Thread(target=executor.server.stop)
        stopper.start()
        wait_until(lambda: executor.server._link._stopped_by is not None)
        assert isinstance(refusal(lambda: executor.open_session("one")), Draining)
        assert not stream.has_ended.is_set()
        executor.runner.gate.set()
        assert isinstance(stream.ended_with(), Draining)
        stopper.join(DEADLINE_S)
        assert not stopper.is_alive()
        assert [1] == executor.runner.executed
        assert [1] == [result.step_id for result in stream.of(StepResult)]

    def test_step_that_outlasts_the_grace_is_left_behind(self, executor):
        """
        A stop does not wait longer than it may for the running step; the stream ends DRAINING all the same.
        """
        client = StepClient(executor)
        stream = client.attach()
        executor.runner.gate.clear()
        stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        assert not executor.server.stop(grace_s=0.05)
        assert executor.server.has_abandoned_step
        assert isinstance(stream.ended_with(), Draining)

    def test_session_that_waits_for_a_stuck_step_ends_the_process(self, executor, monkeypatch):
        """
        A step that is stuck when its scheduler opens the next session ends the process, and the
        opening fails with the same error: only another process can serve that session.
        """
        monkeypatch.setattr(step_cost, "ALWAYS_ALLOWED_S", 0.01)
        client = StepClient(executor)
        stream = client.attach()
        executor.runner.gate.clear()
        stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        refused: list[TandemError] = []
        opener = threading.Thread(
            target=lambda: refused.append(refusal(lambda: executor.open_session("one")))
        )
        opener.start()
        wait_until(lambda: bool(executor.fatal))
        opener.join(DEADLINE_S)
        executor.runner.gate.set()
        assert ["INTERNAL"] == [error.reason for error in executor.fatal]
        assert [executor.fatal[0].message] == [error.message for error in refused]

    @pytest.mark.slow
    def test_process_that_was_stopped_itself_is_not_stuck(self, executor, monkeypatch):
        """
        A step that ran when the process was stopped, as by SIGSTOP, has all its time when that goes on: a session that
        waits for it does not end the process.
        """
        jump_s, num_stops, beat = 0.0, 0, executor.server._link.beat
        is_waiting = threading.Event()

        def beat_then_stop() -> object:
            nonlocal jump_s, num_stops
            said = beat()
            if is_waiting.is_set():
                num_stops += 1
                jump_s += 3 * step_cost.ALWAYS_ALLOWED_S
            return said

        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jump_s)
        monkeypatch.setattr("executor_svc.server.server.time", clock)
        monkeypatch.setattr(
            executor.server._link, "_clock_ns", lambda: time.monotonic_ns() + int(jump_s * 1e9)
        )
        monkeypatch.setattr(executor.server._link, "beat", beat_then_stop)
        client = StepClient(executor)
        stream = client.attach()
        executor.runner.gate.clear()
        stream.send(client.plan())
        wait_until(lambda: executor.runner.is_waiting)
        opener = threading.Thread(target=lambda: executor.open_session("one"))
        opener.start()
        assert isinstance(stream.ended_with(), SessionLost)
        is_waiting.set()
        wait_until(lambda: num_stops >= 4)
        assert [] == executor.fatal
        executor.runner.gate.set()
        opener.join(DEADLINE_S)
        assert not opener.is_alive()

    def test_loader_that_has_failed_is_waited_for(self, monkeypatch):
        """
        A server that is stopped when it hears that loading failed, before the loader's thread has
        ended, ends in order.
        """
        heard, may_end = threading.Event(), threading.Event()

        def load(_boot_id: str) -> Engine:
            raise InvalidModel("no weights")

        def on_fatal(_error: TandemError) -> None:
            heard.set()
            may_end.wait(DEADLINE_S)

        server = ExecutorServer(load, on_fatal)
        server.listen("127.0.0.1:0")
        server.load()
        assert heard.wait(DEADLINE_S)
        join = server._runner.join
        monkeypatch.setattr(server._runner, "join", lambda limit: (may_end.set(), join(limit)))
        assert server.stop(grace_s=DEADLINE_S)

    def test_stopping_while_loading_leaves_the_loader_behind(self, start):
        """
        A stop during loading does not wait for the model.
        """
        go_on = threading.Event()
        running = start(hold_loading=go_on)
        assert not running.server.stop()
        assert [] == running.runners
        go_on.set()
        running.server._runner.join(DEADLINE_S)  # no other test shall share the process with it


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class TestLease:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def link(self, clock):
        link = StepLink("boot", clock)
        link.give_credit(4)
        return link

    def test_lease_ends_without_a_sign_of_life(self, link, clock):
        """
        A silent holder keeps its session until its lease has passed, and is replaced after.
        """
        link.open_session(ONE, take_over=False, lease_s=5.0)
        clock.advance(4.9)
        with pytest.raises(SessionHeld):
            link.open_session(TWO, take_over=False, lease_s=5.0)
        clock.advance(0.2)
        assert 2 == link.open_session(TWO, take_over=False, lease_s=5.0)[0]

    def test_caller_that_never_attaches_shuts_no_one_out_for_long(self, link, clock):
        """
        A holder whose call was answered and that has attached no stream is replaced after seconds,
        however long its lease; before the answer, which may wait for a step, its lease holds.
        """
        link.open_session(ONE, take_over=False, lease_s=60.0)
        clock.advance(30.0)
        with pytest.raises(SessionHeld):
            link.open_session(TWO, take_over=False, lease_s=60.0)
        link.grant(1)
        clock.advance(UNATTACHED_LEASE_S - 0.1)
        with pytest.raises(SessionHeld) as held:
            link.open_session(TWO, take_over=False, lease_s=60.0)
        assert "100" == held.value.metadata["lease_left_ms"]
        clock.advance(0.2)
        assert 2 == link.open_session(TWO, take_over=False, lease_s=60.0)[0]

    def test_stream_gives_the_whole_lease(self, link, clock):
        """
        Once a stream was attached the whole lease counts, also after it broke.
        """
        link.open_session(ONE, take_over=False, lease_s=60.0)
        link.grant(1)
        stream = StepStream(lambda _: None)
        link.attach(Attach(boot_id="boot", session_epoch=1, attach_id=1, acked_step_id=0), stream)
        link.detach(stream)
        clock.advance(59.0)
        with pytest.raises(SessionHeld):
            link.open_session(TWO, take_over=False, lease_s=60.0)

    def test_attached_stream_keeps_the_lease(self, link, clock):
        """
        Heartbeats to an attached stream renew the lease; once detached it runs out.
        """
        link.open_session(ONE, take_over=False, lease_s=5.0)
        stream = StepStream(lambda _: None)
        link.attach(Attach(boot_id="boot", session_epoch=1, attach_id=1, acked_step_id=0), stream)
        for _ in range(10):
            clock.advance(4.0)
            link.beat()
        with pytest.raises(SessionHeld):
            link.open_session(TWO, take_over=False, lease_s=5.0)
        link.detach(stream)
        clock.advance(5.1)
        link.beat()
        assert 2 == link.open_session(TWO, take_over=False, lease_s=5.0)[0]

    def test_errands_keep_their_order_while_a_session_opens(self, link):
        """
        Errands between steps run in the order in which they were asked for, also where a session
        that begins drops steps meanwhile.
        """
        asked: list[str] = []
        late = threading.Thread(target=lambda: link.between_steps(lambda: asked.append("second")))

        class Jobs(queue.SimpleQueue):
            def empty(self) -> bool:
                was_empty = super().empty()
                if was_empty and late.ident is None:
                    late.start()
                    late.join(0.05)
                return was_empty

        link._jobs = Jobs()
        link.between_steps(lambda: asked.append("first"))
        link.open_session(ONE, take_over=False, lease_s=5.0)
        late.join()
        for _ in range(3):
            if isinstance(job := link.next_job(), Errand):
                job.run()
        assert ["first", "second"] == asked

    def test_stopped_link_refuses_sessions_and_gives_no_work(self, link):
        """
        After stop neither sessions nor steps begin.
        """
        link.open_session(ONE, take_over=False, lease_s=5.0)
        assert isinstance(link.next_job(), SlotReset)
        link.stop(Draining("stopping"))
        assert link.next_job() is None
        with pytest.raises(Draining):
            link.open_session(ONE, take_over=False, lease_s=5.0)

    def test_heartbeats_do_not_pile_up_behind_a_reader_that_is_slow(self, link):
        """
        While messages wait to be sent no heartbeat joins them.
        """
        link.open_session(ONE, take_over=False, lease_s=5.0)
        sent: list[bytes] = []
        stream = StepStream(sent.append)
        link.attach(Attach(boot_id="boot", session_epoch=1, attach_id=1, acked_step_id=0), stream)
        for _ in range(50):
            link.beat()
        while not stream.is_idle:
            stream.outgoing.left()
        assert 1 == len(sent)

    def test_result_of_a_fenced_session_is_dropped(self, link):
        """
        A step that was running when a new session opened leaves nothing behind in it.
        """
        link.open_session(ONE, take_over=False, lease_s=5.0)
        stream = StepStream(lambda _: None)
        link.attach(Attach(boot_id="boot", session_epoch=1, attach_id=1, acked_step_id=0), stream)
        step = Step(session_epoch=1, step_id=1, acked_step_id=0, state_hash=0, command=Batch())
        link.receive(step, encode_step(step), stream)
        assert isinstance(link.next_job(), SlotReset)
        assert step is link.next_job().step
        link.open_session(TWO, take_over=True, lease_s=5.0)
        link.complete(step, b"late result")
        sent: list[bytes] = []
        fresh = StepStream(sent.append)
        link.attach(Attach(boot_id="boot", session_epoch=2, attach_id=1, acked_step_id=0), fresh)
        while not fresh.is_idle:
            fresh.outgoing.left()
        assert 1 == len(sent)
        assert b"late result" not in sent
