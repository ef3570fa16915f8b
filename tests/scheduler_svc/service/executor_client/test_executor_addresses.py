"""
Several executors: which one is asked, which one is accepted, and which scheduler may take it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import structlog

from tandem.errors import Draining, SessionHeld
from tandem.link.session import SchedulerId
from tests.ports import free_port
from tests.scheduler_svc.service.fakes.grpc_executor import GrpcExecutor
from tests.scheduler_svc.service.three_requests import assert_all_complete, start

pytestmark = pytest.mark.usefixtures("one_by_one")
US = SchedulerId(name="scheduler-1", incarnation="1")


@pytest.fixture
def addresses() -> list[str]:
    return [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]


@pytest.fixture
def make_executor(addresses) -> Iterator[Callable[..., GrpcExecutor]]:
    """Yield a function that starts an executor at the first or second address."""
    executors: list[GrpcExecutor] = []

    def make(place: int, **changes) -> GrpcExecutor:
        executors.append(GrpcExecutor(addresses[place], **changes).start())
        return executors[-1]

    yield make
    for executor in executors:
        executor.kill()


@pytest.fixture
def make_service(make_bench, addresses):
    def make(**settings):
        first, *others = addresses
        known = {"executor": first, "standby": ",".join(others), "lease_ms": 1000}
        return make_bench(has_real_link=True, **(known | settings))

    return make


def refusal_of(bench, frontend) -> str:
    return frontend.availabilities[-1].refusal


class TestChoosing:
    def test_first_is_preferred(self, make_service, make_executor):
        """The first address that can be used is used; the others are left alone."""
        first, second = make_executor(0, boot_id="a"), make_executor(1, boot_id="b")
        bench = make_service()
        assert_all_complete(bench, start(bench))
        assert (1, 0) == (first.num_sessions, second.num_sessions)

    def test_next_is_tried_when_one_cannot_be_used(self, make_service, make_executor):
        """An address without a listener does not keep the service from the next one."""
        executor = make_executor(1)
        bench = make_service()
        assert_all_complete(bench, start(bench))
        assert executor.address == bench.session.address

    def test_held_executor_is_passed_over(self, make_service, make_executor):
        """An executor that another scheduler holds is passed over for one that is free."""
        held = make_executor(0, boot_id="a", holder="other", holder_lease_s=500.0)
        make_executor(1, boot_id="b")
        bench = make_service()
        assert_all_complete(bench, start(bench))
        assert 0 == held.num_sessions

    def test_each_problem_is_reported_once(self, make_service):
        """Each address that does not answer is warned of once, however often it is tried."""
        bench = make_service()
        with structlog.testing.capture_logs() as logs:
            bench.frontend()
            bench.until(lambda: len([log for log in logs if "retry_in_s" in log]) >= 6)
        failed = [log for log in logs if log["event"] == "executor_connect_failed"]
        assert 2 == len([log for log in failed if log["log_level"] == "warning"])
        assert 2 == len({log["address"] for log in failed})


class TestMoving:
    @pytest.mark.slow
    def test_work_moves_when_the_executor_is_gone(self, make_service, make_executor):
        """Requests of a dead executor go on at another with the same model, each at its next token."""
        first = make_executor(0, boot_id="a")
        make_executor(1, boot_id="b")
        bench = make_service()
        frontend = start(bench)
        first.kill()
        assert_all_complete(bench, frontend)
        assert 2 == bench.session.counts.executor_sessions

    def test_work_moves_when_the_executor_drains(self, make_service, make_executor):
        """An executor that stops in good order hands over to the next address at once."""
        first = make_executor(0, boot_id="a")
        second = make_executor(1, boot_id="b")
        bench = make_service()
        frontend = start(bench)
        first.end_stream(Draining("stopping"))
        assert_all_complete(bench, frontend)
        assert (1, 1) == (first.num_sessions, second.num_sessions)

    def test_broken_stream_does_not_move_the_work(self, make_service, make_executor):
        """An executor that can be attached again keeps its requests, others or not."""
        first = make_executor(0, boot_id="a")
        second = make_executor(1, boot_id="b")
        bench = make_service()
        frontend = start(bench)
        for num_cuts in range(1, 4):
            first.cut()
            bench.until(lambda n=num_cuts: bench.session.counts.executor_reattachments == n)
        assert_all_complete(bench, frontend)
        assert (1, 0) == (first.num_sessions, second.num_sessions)


class TestFingerprint:
    @pytest.mark.slow
    def test_other_model_is_refused_while_requests_live(self, make_service, make_executor):
        """
        Requests wait for their own model and go on when it is back; the other model is named
        meanwhile.
        """
        first = make_executor(0, boot_id="a")
        other = make_executor(1, boot_id="b", fingerprint="e" * 64)
        bench = make_service()
        frontend = start(bench)
        first.kill()
        bench.until(lambda: "it serves sums (eeeeeeee" in refusal_of(bench, frontend))
        assert 0 == other.num_sessions
        make_executor(0, boot_id="c")
        assert_all_complete(bench, frontend)
        assert "" == refusal_of(bench, frontend)

    @pytest.mark.slow
    def test_other_model_is_adopted_when_time_is_up(self, make_service, make_executor):
        """Requests fail MODEL_CHANGED after recovery_timeout_s, and the other model is served."""
        first = make_executor(0, boot_id="a")
        make_executor(1, boot_id="b", fingerprint="e" * 64)
        bench = make_service(recovery_timeout_s=600.0)
        frontend = start(bench)
        first.kill()
        bench.until(lambda: "it serves sums (eeeeeeee" in refusal_of(bench, frontend))
        bench.lead_s += 601.0
        bench.until(lambda: len(frontend.failed) == 3)
        assert {"MODEL_CHANGED"} == {failed.reason for failed in frontend.failed.values()}
        bench.until(lambda: len(frontend.models) == 2 and frontend.availabilities[-1].ready)
        frontend.submit(7, [77], 5)
        bench.until(lambda: 7 in frontend.ended)
        assert "e" * 64 == frontend.models[-1].revision

    def test_other_model_is_adopted_at_once_without_requests(self, make_service, make_executor):
        """An idle service takes any model."""
        first = make_executor(0, boot_id="a")
        make_executor(1, boot_id="b", fingerprint="e" * 64)
        bench = make_service()
        frontend = start(bench)
        assert_all_complete(bench, frontend)
        first.kill()
        bench.until(lambda: len(frontend.models) == 2 and frontend.availabilities[-1].ready)


class TestLeaving:
    def test_who_had_no_session_opens_none_to_end_it(self, make_service, make_executor):
        """A scheduler that stops without ever having had a session opens none."""
        executor = make_executor(0, protocol_version=99)
        bench = make_service()
        frontend = bench.frontend()
        bench.until(lambda: "step protocol 99" in refusal_of(bench, frontend))
        bench.real_link.stop(release=True)
        bench.has_real_link = False
        assert executor.end.holder is None


class TestTakingOver:
    def test_operator_may_take_a_held_executor(self, make_service, make_executor):
        """The first session fences the executor's holder if take_over is set."""
        executor = make_executor(0, holder="other", holder_lease_s=500.0)
        bench = make_service(take_over=True)
        assert_all_complete(bench, start(bench))
        assert US == executor.end.holder

    def test_take_over_is_good_for_one_session(self, make_service, make_executor):
        """A scheduler that took over and was then fenced itself waits for the lease."""
        executor = make_executor(0, holder="other", holder_lease_s=500.0)
        bench = make_service(take_over=True)
        frontend = start(bench)
        rival = SchedulerId(name="rival", incarnation="1")
        with executor.computing:
            executor.end.open_session(rival, True, 500.0, executor.now())
        executor.end_stream(executor.end.fenced())
        bench.until(lambda: "scheduler rival" in refusal_of(bench, frontend))
        bench.until(lambda: "lease" in refusal_of(bench, frontend))
        assert not frontend.availabilities[-1].ready
        assert rival == executor.end.holder
        executor.lead_s += 501.0
        assert_all_complete(bench, frontend)

    def test_heir_of_a_dead_scheduler_waits_for_no_lease(self, make_service, make_executor):
        """A scheduler restarted under its name gets the executor of its dead predecessor at once."""
        make_executor(0, holder="scheduler-1", holder_lease_s=500.0)
        bench = make_service()
        with structlog.testing.capture_logs() as logs:
            assert_all_complete(bench, start(bench))
        assert not [log for log in logs if log.get("reason") == "SESSION_HELD"]

    def test_predecessor_that_lives_on_stays_fenced(self, make_service, make_executor):
        """The incarnation that was replaced does not get the session back while its heir lives."""
        executor = make_executor(0)
        older = SchedulerId(name="scheduler-1", incarnation="0")
        executor.end.open_session(older, False, 500.0, executor.now())
        bench = make_service(lease_ms=60_000)
        start(bench)
        with pytest.raises(SessionHeld):
            executor.end.open_session(older, False, 500.0, executor.now())
