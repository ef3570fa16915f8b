"""The loop's treatment of an executor that is silent, stuck, replaced or taken away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog

from scheduler_svc.executor_client.link_events import ConnectFailed, StreamBroken
from scheduler_svc.executor_client.session import STREAMS_IN_VAIN
from tandem.errors import ModelChanged, SessionHeld, SessionLost
from tandem.link.session import LossCause
from tandem.status import PeerUnavailable
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY
from tests.scheduler_svc.service.fakes.fake_link import describe
from tests.scheduler_svc.service.three_requests import (
    NUM_PROMPT_TOKENS,
    assert_all_complete,
    assert_nothing_recomputed,
    start,
    stats_of,
)

WINDOWS = pytest.mark.parametrize("window", [1, 2, 4, 16])


class TestStoppedExecutor:
    @WINDOWS
    def test_back_in_time_loses_nothing(self, make_bench, window):
        """
        An executor that is silent for less than lost_after_s makes the service unready for that
        time and computes nothing twice, though its stream was opened anew meanwhile.
        """
        bench = make_bench(window=window, run_ahead=window)
        frontend = start(bench)
        bench.link.is_stopped = True
        bench.let_pass(3.0)
        assert not frontend.availabilities[-1].ready
        bench.let_pass(20.0)
        bench.link.go_on()
        bench.until(lambda: frontend.availabilities[-1].ready)
        assert_all_complete(bench, frontend)
        assert bench.link.commands.count("attach") >= 2
        assert 1 == bench.link.commands.count("connect")
        assert_nothing_recomputed(bench, frontend)

    def test_short_silence_keeps_the_stream(self, make_bench):
        """A stream that is silent for a moment goes on."""
        bench = make_bench()
        frontend = start(bench)
        bench.link.is_stopped = True
        bench.let_pass(4.0)
        bench.link.go_on()
        assert_all_complete(bench, frontend)
        assert ["connect", "attach"] == bench.link.commands

    def test_is_given_up_after_lost_after_s(self, bench, deaths):
        """
        Silence for longer than lost_after_s ends the session, and other executors are asked first.
        """
        frontend = start(bench)
        bench.link.is_stopped = True
        bench.let_pass(29.0)
        assert [] == deaths
        bench.let_pass(2.0)
        assert [0] == deaths
        assert "connect elsewhere" in bench.link.commands
        bench.link.is_stopped = False
        bench.link.boot("boot-2")
        assert_all_complete(bench, frontend)
        assert stats_of(bench, frontend).recomputed_tokens > NUM_PROMPT_TOKENS

    def test_lost_after_s_may_be_short(self, make_bench):
        """A lost_after_s of two seconds is kept, with a new stream tried before."""
        bench = make_bench(lost_after_s=2.0)
        start(bench)
        bench.link.is_stopped = True
        bench.let_pass(1.5)
        assert 1 < bench.link.commands.count("attach")
        assert 0 == stats_of(bench, bench.frontends[0]).executor_losses
        bench.let_pass(1.5)
        assert 1 == stats_of(bench, bench.frontends[0]).executor_losses


class TestLateStep:
    def test_heartbeats_do_not_save_a_stuck_step(self, bench, deaths):
        """A step that is late for longer than lost_after_s is given up and blamed."""
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: len(bench.link._pending) >= 2)
        second = bench.link._pending[1].step_id
        bench.link.beat(elapsed_ms=10_500, running_step_id=second)
        bench.until(lambda: not frontend.availabilities[-1].ready)
        bench.link.beat(elapsed_ms=39_000, running_step_id=second)
        bench.turn()
        assert [] == deaths
        bench.link.beat(elapsed_ms=40_500, running_step_id=second)
        bench.until(lambda: deaths)
        assert [1] == deaths
        assert "connect elsewhere" == bench.link.commands[-1]

    def test_slow_steps_allow_slower_ones(self, bench):
        """A step is late only when it is older than twenty steps that computed as much."""
        frontend = start(bench)
        bench.link.computes_s = 1.0
        done = len(frontend.tokens[0])
        bench.until(lambda: len(frontend.tokens[0]) >= done + 10)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.beat(elapsed_ms=11_000)
        bench.turn()
        assert frontend.availabilities[-1].ready
        bench.link.beat(elapsed_ms=60_000)
        bench.until(lambda: not frontend.availabilities[-1].ready)

    def test_late_step_that_ends_after_all_is_forgiven(self, bench):
        """The result of a late step makes the service ready without a heartbeat."""
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.beat(elapsed_ms=15_000)
        bench.until(lambda: not frontend.availabilities[-1].ready)
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: frontend.availabilities[-1].ready)
        assert_all_complete(bench, frontend)

    @pytest.mark.parametrize("then", ["is given up", "is cut off"])
    def test_stays_unready_until_another_step_can_run(self, bench, then):
        """
        A service with a stuck executor stays unready when it loses the executor or its stream.
        """
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.beat(elapsed_ms=15_000)
        bench.until(lambda: not frontend.availabilities[-1].ready)
        num_told = len(frontend.availabilities)
        bench.link.is_up = False
        if then == "is given up":
            bench.link.beat(elapsed_ms=45_000)
            bench.until(lambda: "connect elsewhere" in bench.link.commands)
        else:
            bench.link.cut()
        bench.let_pass(5.0)
        assert not any(told.ready for told in frontend.availabilities[num_told:])
        bench.link.is_holding = False
        bench.link.boot("boot-2")
        assert_all_complete(bench, frontend)
        assert frontend.availabilities[-1].ready


class TestLostMessages:
    @WINDOWS
    @pytest.mark.parametrize("what", ["num_to_drop", "num_results_to_drop"])
    def test_living_stream_that_lost_a_message_is_opened_anew(self, make_bench, window, what):
        """
        A stream is opened again when heartbeats say that no step runs while results are awaited:
        lost messages come again, and nothing is computed twice.
        """
        bench = make_bench(window=window, run_ahead=1)
        bench.link.is_holding = True
        frontend = start(bench, until=0)
        bench.until(lambda: bench.link._pending)
        setattr(bench.link, what, 100)
        bench.link.is_holding = False
        bench.link.compute()
        for _ in range(3):
            bench.link.beat()
            bench.let_pass(0.5)
        setattr(bench.link, what, 0)
        for _ in range(8):
            bench.link.beat()
            bench.let_pass(0.5)
        assert_all_complete(bench, frontend)
        assert stats_of(bench, frontend).executor_reattachments >= 1
        assert_nothing_recomputed(bench, frontend)

    def test_idle_service_is_left_in_peace(self, bench):
        """Idle heartbeats while no step waits for its result cause no new stream."""
        frontend = start(bench)
        assert_all_complete(bench, frontend)
        for _ in range(10):
            bench.link.beat()
            bench.let_pass(0.5)
        assert ["connect", "attach"] == bench.link.commands

    @pytest.mark.parametrize("what", ["num_to_drop", "num_results_to_drop"])
    def test_message_that_never_gets_through_ends_the_session(self, bench, deaths, what):
        """
        A step or result that is lost on stream after stream ends the session, and a new one begins.
        """
        setattr(bench.link, what, 10**6)
        frontend = start(bench, until=0)
        bench.until(lambda: bench.session._in_flight)
        for _ in range(STREAMS_IN_VAIN + 1):
            bench.until(lambda: bench.session.is_attached)
            assert [] == deaths
            bench.link.cut()
            bench.turn()
        bench.until(lambda: deaths)
        assert [None] == deaths
        setattr(bench.link, what, 0)
        assert_all_complete(bench, frontend)

    def test_step_that_computes_keeps_its_session(self, bench, deaths):
        """An executor keeps its session while a step computes, however often the stream breaks."""
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        for _ in range(3 * STREAMS_IN_VAIN):
            bench.link.cut()
            bench.turn()
            bench.until(lambda: bench.session.is_attached)
        bench.link.is_holding = False
        bench.link.compute()
        assert_all_complete(bench, frontend)
        assert [] == deaths


class TestOtherAddresses:
    def test_are_asked_when_the_executor_cannot_be_reached(self, bench):
        """Other executors are tried in between after some streams that could not be opened."""
        frontend = start(bench)
        bench.link.kill()
        bench.turn()
        assert "seek" not in bench.link.commands
        for _ in range(3):
            broken = StreamBroken(stream=bench.link._stream, error=PeerUnavailable("refused"))
            bench.link.post(broken)
            bench.turn()
        assert "seek" in bench.link.commands
        assert 0 == stats_of(bench, frontend).executor_losses

    def test_first_to_answer_takes_the_work(self, bench, deaths):
        """A session opened with another executor ends the one that could not be reached."""
        frontend = start(bench)
        bench.link.kill()
        bench.turn()
        bench.link._wants_session = True
        bench.link.boot("boot-2")
        assert_all_complete(bench, frontend)
        assert [0] == deaths
        stats = stats_of(bench, frontend)
        assert (2, 1) == (stats.executor_sessions, stats.executor_losses)
        assert stats.recomputed_tokens >= NUM_PROMPT_TOKENS


class TestFencing:
    def test_fenced_scheduler_turns_unready_and_says_why(self, bench):
        """A fenced scheduler is unready at once, names the new holder, and does not take over."""
        frontend = start(bench)
        bench.link.is_up = False
        fenced = {"cause": "fenced", "holder": "other", "incarnation": "7"}
        bench.link.cut(SessionLost("fenced", metadata=fenced))
        bench.until(lambda: not frontend.availabilities[-1].ready)
        assert "scheduler other has taken the executor over" in (
            frontend.availabilities[-1].refusal
        )
        held = SessionHeld("scheduler other/7 holds", metadata={"holder": "other"})
        bench.link.post(ConnectFailed(error=held, retry_in_s=1.0, address="a:1"))
        bench.until(lambda: "other/7 holds" in frontend.availabilities[-1].refusal)
        assert stats_of(bench, frontend).executor_refusal == frontend.availabilities[-1].refusal
        assert 1 == stats_of(bench, frontend).executor_fencings
        bench.link.boot("boot-1")
        assert_all_complete(bench, frontend)
        assert "" == frontend.availabilities[-1].refusal


class TestOtherModel:
    def refuse(self, bench) -> None:
        """Report that the only executor which answers has another model."""
        other = ConnectFailed(
            error=ModelChanged("it serves others"),
            retry_in_s=1.0,
            address="b:1",
            description=describe("boot-9", "e" * 64),
        )
        bench.link.post(other)
        bench.turn()

    def test_is_not_accepted_while_requests_live(self, bench):
        """The link is told which model live requests need, or None if there are no requests."""
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].ready)
        assert bench.link.required is None
        start(bench, frontend)
        assert "f" * 64 == bench.link.required.fingerprint
        assert_all_complete(bench, frontend)
        bench.turn()
        assert bench.link.required is None

    def test_ends_requests_when_no_other_comes_in_time(self, make_bench):
        """
        Requests fail MODEL_CHANGED after recovery_timeout_s, and the new model is served and logged
        with its fingerprint.
        """
        bench = make_bench(recovery_timeout_s=50.0)
        frontend = start(bench)
        bench.link.kill()
        self.refuse(bench)
        bench.until(lambda: frontend.availabilities[-1].refusal)
        bench.let_pass(45.0)
        assert {} == frontend.failed
        bench.let_pass(6.0)
        assert ["MODEL_CHANGED"] * 3 == [failed.reason for failed in frontend.failed.values()]
        bench.turn()
        assert bench.link.required is None
        bench.link._wants_session = True
        with structlog.testing.capture_logs() as logs:
            bench.link.boot("boot-9", fingerprint="e" * 64)
            bench.until(lambda: frontend.availabilities[-1].ready)
        (changed,) = [entry for entry in logs if entry["event"] == "model_changed"]
        assert ("e" * 16 in changed["model"], "f" * 16 in changed["previous"]) == (True, True)
        frontend.submit(7, [77], 5)
        bench.until(lambda: 7 in frontend.ended)
        assert ["f" * 64, "e" * 64] == [model.revision for model in frontend.models]

    def test_that_came_and_went_does_not_decide(self, make_bench):
        """Requests fail EXECUTOR_LOST when an executor of another model came and went."""
        bench = make_bench(recovery_timeout_s=5.0)
        frontend = start(bench)
        bench.link.kill()
        self.refuse(bench)
        gone = PeerUnavailable("nobody answers")
        bench.link.post(ConnectFailed(error=gone, retry_in_s=1.0, address="b:1"))
        bench.let_pass(6.0)
        assert {"EXECUTOR_LOST"} == {failed.reason for failed in frontend.failed.values()}

    def test_own_model_in_time_goes_on(self, make_bench):
        """
        An executor with the same fingerprint takes the requests, though another was refused before.
        """
        bench = make_bench(recovery_timeout_s=50.0)
        frontend = start(bench)
        bench.link.kill()
        self.refuse(bench)
        bench.let_pass(45.0)
        bench.link._wants_session = True
        bench.link.boot("boot-2", geometry=replace(GEOMETRY, num_blocks=60))
        assert_all_complete(bench, frontend)


class TestDisagreement:
    def test_both_sides_log_their_columns(self, bench):
        """A state hash mismatch is counted as a bug, and the scheduler logs its own columns."""
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.is_holding = False
        with structlog.testing.capture_logs() as logs:
            bench.link.cut(SessionLost("a test", metadata=LossCause.STATE_HASH.as_metadata()))
            assert_all_complete(bench, frontend)
        (logged,) = [entry for entry in logs if entry["event"] == "state_hash_mismatch"]
        assert "error" == logged["log_level"]
        assert 3 == len(logged["slot"]) == len(logged["generation"]) == len(logged["planned"])
        assert all(logged["blocks"])
        stats = stats_of(bench, frontend)
        assert (1, 1) == (stats.state_hash_mismatches, stats.executor_losses)
