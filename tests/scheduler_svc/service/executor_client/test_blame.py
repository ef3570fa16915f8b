"""The step, if any, that is to blame for the loss of a session."""

from __future__ import annotations

import pytest

from scheduler_svc.executor_client.link_events import PathFound, StreamMessage
from scheduler_svc.executor_client.session import LOSSES_IN_VAIN
from tandem.errors import Draining, InternalError, SessionLost
from tandem.link.results import StepFailed
from tandem.link.session import LossCause
from tests.scheduler_svc.service.three_requests import (
    assert_all_complete,
    start,
)


class TestBlame:
    @pytest.mark.parametrize(
        ("cause", "blamed"),
        [
            (LossCause.NEW_BOOT, 0),
            (LossCause.FENCED, None),
            (LossCause.STATE_HASH, None),
            (LossCause.PROTOCOL, None),
        ],
        ids=lambda value: getattr(value, "value", value),
    )
    def test_refused_stream(self, bench, deaths, cause, blamed):
        """A new boot, and no other refusal of a stream, blames a step for the executor's death."""
        start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.cut(SessionLost("a test", metadata=cause.as_metadata()))
        bench.until(lambda: deaths)
        assert [blamed] == deaths

    def test_new_boot_blames_the_step_that_ran_last(self, bench, deaths):
        """
        The step that ran at the last heartbeat is to blame, not an earlier one without its result.
        """
        start(bench)
        bench.link.is_holding = True
        bench.until(lambda: len(bench.link._pending) >= 2)
        bench.link.beat(elapsed_ms=5, running_step_id=bench.link._pending[1].step_id)
        bench.turn()
        bench.link.cut(SessionLost("a test", metadata=LossCause.NEW_BOOT.as_metadata()))
        bench.until(lambda: deaths)
        assert [1] == deaths

    def test_idle_executor_dies_of_nothing(self, bench, deaths):
        """An executor that dies without a step in flight blames no step."""
        frontend = start(bench)
        assert_all_complete(bench, frontend)
        bench.until(lambda: not bench.session._in_flight)
        bench.link.cut(SessionLost("a test", metadata=LossCause.NEW_BOOT.as_metadata()))
        bench.until(lambda: deaths)
        assert [None] == deaths

    @pytest.mark.parametrize("cause", [LossCause.STATE_HASH, LossCause.PROTOCOL])
    def test_steps_that_always_lose_their_session_are_blamed_in_the_end(self, bench, deaths, cause):
        """A step is blamed after four sessions in a row have ended before any step succeeded."""
        start(bench)
        bench.link.is_holding = True
        for num_lost in range(LOSSES_IN_VAIN + 1):
            bench.until(lambda: bench.link._pending)
            bench.link.cut(SessionLost("a test", metadata=cause.as_metadata()))
            bench.until(lambda n=num_lost: len(deaths) > n)
        assert [*[None] * LOSSES_IN_VAIN, 0] == deaths

    def test_failed_step_is_to_blame_itself(self, bench, deaths):
        """A failed step is the oldest without a result, whatever a heartbeat said before."""
        start(bench)
        bench.link.is_holding = True
        bench.until(lambda: len(bench.link._pending) >= 2)
        step = bench.link._pending[0]
        bench.link.beat(running_step_id=step.step_id)
        failed = StepFailed(
            boot_id="boot-1", step_id=step.step_id, reason="INTERNAL", message="a test"
        )
        bench.link.post(StreamMessage(stream=bench.link._stream, message=failed))
        bench.until(lambda: deaths)
        assert [0] == deaths

    def test_step_out_of_memory_is_told_as_that(self, bench, monkeypatch):
        """
        A step that ran out of memory is no death: the core learns which step it was, and makes
        steps smaller.
        """
        causes = []
        note_loss = type(bench.session.counts).note_loss
        monkeypatch.setattr(
            type(bench.session.counts),
            "note_loss",
            lambda counts, cause: (causes.append(cause), note_loss(counts, cause)),
        )
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        failed = StepFailed(
            boot_id="boot-1",
            step_id=bench.link._pending[0].step_id,
            reason="OUT_OF_MEMORY",
            message="lower max_batch_size",
        )
        bench.link.is_holding = False
        bench.link.post(StreamMessage(stream=bench.link._stream, message=failed))
        assert_all_complete(bench, frontend)
        assert [LossCause.OUT_OF_MEMORY] == causes
        core = bench.loop._state.core
        stats = core.stats()
        assert (1, 0) == (stats.out_of_memory_steps, stats.executor_deaths)
        assert not core._cell.suspects.has_marks

    def test_executor_that_ends_by_its_own_failure_is_blamed_on_its_step(self, bench, deaths):
        """
        An executor that ends by a failure of its own and comes back as another boot blames its
        step, as one that was killed does.
        """
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.is_up = bench.link.is_holding = False
        bench.link.cut(InternalError("the runner thread broke"))
        bench.turn()
        assert [] == deaths
        bench.link.boot("boot-2")
        bench.until(lambda: deaths)
        assert [0] == deaths
        assert_all_complete(bench, frontend)

    def test_draining_executor_is_left_without_blame(self, bench, deaths):
        """
        An executor that stops in good order is left for another at once, and no step is blamed.
        """
        frontend = start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.is_holding = False
        bench.link.cut(Draining("stopping"))
        bench.until(lambda: deaths)
        assert [None] == deaths
        assert "connect elsewhere" in bench.link.commands
        assert_all_complete(bench, frontend)


def deaths_counted(bench) -> int:
    return bench.loop._state.core.stats().executor_deaths


class TestUnheard:
    """Sessions of an executor that is silent: it is unknown whether it died of its step."""

    def lose(self, bench, how: str) -> None:
        """Lose a session with a step in flight, and let the service ask for another one."""
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        if how == "silent":
            bench.link.is_up = False
            bench.let_pass(31.0)
        else:
            bench.link.kill()
            bench.turn()
            bench.link._wants_session = True
        bench.link.is_holding = bench.link.is_up = False

    def test_silence_of_an_executor_that_lives_fails_nobody(self, bench):
        """
        A request that ran alone while its executor fell silent is no poison if the executor lives,
        however often that happens.
        """
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].executor_attached)
        frontend.submit(0, [5, 6, 7], 40)
        bench.until(lambda: frontend.tokens.get(0))
        for _ in range(5):
            self.lose(bench, "silent")
            bench.link.boot("boot-1")
            num_tokens = len(frontend.tokens[0])
            bench.until(lambda n=num_tokens: len(frontend.tokens[0]) > n)
        bench.until(lambda: frontend.ended)
        assert ({}, 0) == (frontend.failed, deaths_counted(bench))

    def test_silence_without_any_step_between_is_blamed_in_the_end(self, bench):
        """A step that silences its living executor in every session is blamed in the end."""
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].executor_attached)
        frontend.submit(0, [5, 6, 7], 40)
        bench.until(lambda: frontend.tokens.get(0))
        for _ in range(LOSSES_IN_VAIN + 2):
            assert not frontend.failed
            self.lose(bench, "silent")
            bench.link.is_holding = True
            bench.link.boot("boot-1")
        bench.until(lambda: frontend.failed)
        assert "POISON_REQUEST" == frontend.failed[0].reason
        assert 2 == deaths_counted(bench)

    def test_executor_found_where_another_fell_silent_proves_its_death(self, bench):
        """Each address has at most one unproven death, also if a stream finds its way there."""
        frontend = start(bench)
        self.lose(bench, "moved")
        bench.link.boot("boot-2", address="fake:2")
        session = bench.session
        bench.until(lambda: session.counts.executor_sessions == 2 and session.is_attached)
        bench.link.post(PathFound(boot_id="boot-2", address="fake:1"))
        self.lose(bench, "silent")
        assert 1 == deaths_counted(bench)
        assert ["boot-2"] == list(bench.loop._state.core._cell.suspects._unproven_deaths)
        bench.link.boot("boot-2", address="fake:2")
        assert_all_complete(bench, frontend)
        assert (1, {}) == (
            deaths_counted(bench),
            bench.loop._state.core._cell.suspects._unproven_deaths,
        )

    def test_silence_before_a_new_boot_is_a_death(self, bench):
        """
        An executor that fell silent and comes back as another boot has died, in the step that ran.
        """
        frontend = start(bench)
        self.lose(bench, "silent")
        assert 0 == deaths_counted(bench)
        bench.link.boot("boot-2")
        assert_all_complete(bench, frontend)
        assert 1 == deaths_counted(bench)

    @pytest.mark.parametrize(("returns_as", "num_deaths"), [("boot-1", 0), ("boot-3", 1)])
    def test_fate_is_learned_when_the_work_moves_back(self, bench, returns_as, num_deaths):
        """
        A death is counted for work that moved once another boot is seen at the old address, and not
        if the same boot is.
        """
        frontend = start(bench)
        self.lose(bench, "moved")
        bench.link.boot("boot-2", address="fake:2")
        session = bench.session
        bench.until(lambda: session.counts.executor_sessions == 2 and session.is_attached)
        assert 0 == deaths_counted(bench)
        bench.link.cut(Draining("stopping"))
        bench.link.is_up = False
        bench.turn()
        bench.link.boot(returns_as, address="fake:1")
        bench.until(lambda: session.counts.executor_sessions == 3)
        assert num_deaths == deaths_counted(bench)
        assert_all_complete(bench, frontend)
