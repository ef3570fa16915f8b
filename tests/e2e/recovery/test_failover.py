"""Executors and schedulers, as processes, that are stopped, killed, replaced or in competition."""

from __future__ import annotations

import pytest

from tandem.errors import ExecutorLost, ModelChanged
from tests.e2e.cluster import paused
from tests.e2e.recovery.failover import Fleet, Reader
from tests.ports import free_port
from tests.waiting import LIMIT_S, wait_until

NUM_STREAMS = 8
pytestmark = pytest.mark.slow


@pytest.fixture
def make_fleet(tmp_path):
    fleets: list[Fleet] = []

    def make(**options) -> Fleet:
        fleets.append(Fleet(tmp_path, **options))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def undisturbed(scheduler, num_tokens: int) -> list[list[int]]:
    """Return the tokens of undisturbed streams."""
    return Reader(scheduler, num_streams=NUM_STREAMS, num_tokens=num_tokens).finish()


def assert_nothing_lost(scheduler, reader: Reader, fleet: Fleet) -> None:
    """Leave the streams, and compare their tokens with those of undisturbed streams."""
    found = reader.stop()
    assert [] == reader.errors, fleet.logs()
    expected = undisturbed(scheduler, max(map(len, found)))
    assert [tokens[: len(one)] for tokens, one in zip(expected, found, strict=True)] == found


class TestStoppedExecutor:
    @pytest.mark.parametrize("is_long", [False, True], ids=["short", "stream-opened-anew"])
    def test_goes_on_where_it_was(self, make_fleet, is_long):
        """
        An executor under SIGSTOP for less than lost_after_s makes the service unready; after
        SIGCONT it is ready again, no token is lost and none is computed twice.
        """
        fleet = make_fleet()
        executor, scheduler = fleet.executor(), fleet.scheduler()
        scheduler.wait_ready()
        undisturbed(scheduler, 1)
        before = scheduler.wait_idle()
        reader = Reader(scheduler, num_streams=NUM_STREAMS)
        reader.wait_for(20)
        with paused(executor.process.pid):
            scheduler.wait_ready(ready=False)
            if is_long:
                wait_until(lambda: "executor_stream_broken" in scheduler.log(), "another stream")
        scheduler.wait_ready()
        reader.wait_for(20)
        after = scheduler.stats()
        assert (1, 0, 0) == (
            after.executor_sessions,
            after.executor_losses,
            after.recomputed_tokens,
        )
        if is_long:
            assert after.executor_reattachments > 0
        assert 2 * before.prefill_tokens == after.prefill_tokens
        assert_nothing_lost(scheduler, reader, fleet)

    def test_is_given_up_for_another(self, make_fleet):
        """An executor that stays silent for lost_after_s loses its work to the next address."""
        fleet = make_fleet(num_executors=2)
        first = fleet.executor(0)
        scheduler = fleet.scheduler("--lost-after-s=3")
        scheduler.wait_ready()
        fleet.executor(1)
        reader = Reader(scheduler, num_streams=NUM_STREAMS)
        reader.wait_for(20)
        with paused(first.process.pid):
            wait_until(lambda: scheduler.stats().executor_losses > 0, "a loss")
            reader.wait_for(20)
            assert_nothing_lost(scheduler, reader, fleet)
            stats = scheduler.stats()
            assert fleet.executor_addresses[1] == stats.executor_address
        assert stats.executor_losses + 1 == stats.executor_sessions
        assert stats.recomputed_tokens > 0


class TestKilledExecutor:
    def test_work_moves_to_the_second_address(self, make_fleet):
        """
        A second executor with the same model takes every stream on after kill -9 of the first, and
        back.
        """
        fleet = make_fleet(num_executors=2)
        executors = [fleet.executor(0)]
        scheduler = fleet.scheduler()
        scheduler.wait_ready()
        executors.append(fleet.executor(1))
        reader = Reader(scheduler, num_streams=NUM_STREAMS)
        reader.wait_for(20)
        executors[0].kill()
        reader.wait_for(20)
        executors[0] = fleet.executor(0)
        reader.wait_for(5)
        executors[1].kill()
        reader.wait_for(20)
        assert_nothing_lost(scheduler, reader, fleet)
        stats = scheduler.wait_idle()
        assert (3, 2) == (stats.executor_sessions, stats.executor_losses)
        assert fleet.executor_addresses[0] == stats.executor_address

    def test_other_weights_take_over_only_when_time_is_up(self, make_fleet):
        """
        Running requests fail MODEL_CHANGED after recovery_timeout_s; new ones get the new model.
        """
        fleet = make_fleet(num_executors=2)
        executor = fleet.executor(0)
        scheduler = fleet.scheduler("--recovery-timeout-s=8")
        scheduler.wait_ready()
        fleet.executor(1, seed=1)
        reader = Reader(scheduler, num_streams=NUM_STREAMS)
        reader.wait_for(5)
        executor.kill()
        reader.finish()
        log = scheduler.log()
        assert log.index("running requests need") < log.index("executor_given_up")
        assert [ModelChanged] * NUM_STREAMS == [type(error) for error in reader.errors]
        scheduler.wait_ready()
        assert all(undisturbed(scheduler, 20))
        assert fleet.executor_addresses[1] == scheduler.stats().executor_address

    def test_rollout_loses_nothing(self, make_fleet):
        """An executor that is told to stop hands over to the next address and exits with 0."""
        fleet = make_fleet(num_executors=2)
        first = fleet.executor(0)
        scheduler = fleet.scheduler()
        scheduler.wait_ready()
        fleet.executor(1)
        reader = Reader(scheduler, num_streams=NUM_STREAMS)
        reader.wait_for(20)
        first.process.terminate()
        assert 0 == first.process.wait(LIMIT_S)
        reader.wait_for(20)
        assert_nothing_lost(scheduler, reader, fleet)


class TestSchedulers:
    def test_restarted_scheduler_need_not_wait_for_its_own_lease(self, make_fleet):
        """
        A scheduler that follows a killed one on the same address gets the executor at once, all
        slots empty, though the lease would last for minutes.
        """
        fleet = make_fleet()
        fleet.executor()
        first = fleet.scheduler(listen=f"127.0.0.1:{free_port()}")
        first.wait_ready()
        expected = undisturbed(first, 50)
        reader = Reader(first, num_streams=NUM_STREAMS)
        reader.wait_for(5)
        first.process.end()
        reader.finish()
        second = fleet.scheduler(listen=first.address)
        second.wait_ready()
        assert expected == undisturbed(second, 50)
        second.wait_idle()

    def test_fenced_scheduler_stands_back(self, make_fleet):
        """
        A second scheduler is refused while the first lives, and takes everything with --take-over;
        the first is unready from then on, says which scheduler has the executor, and fails its
        requests rather than take it back.
        """
        fleet = make_fleet()
        fleet.executor()
        first = fleet.scheduler("--recovery-timeout-s=4", "--scheduler-name=first")
        first.wait_ready()
        reader = Reader(first, num_streams=NUM_STREAMS)
        reader.wait_for(5)
        polite = fleet.scheduler("--scheduler-name=polite")
        wait_until(lambda: "first/" in polite.stats().executor_refusal, "refusal")
        reader.wait_for(5)
        rival = fleet.scheduler("--scheduler-name=rival", "--take-over")
        rival.wait_ready()
        first.wait_ready(ready=False)
        fenced = "scheduler rival has taken the executor over"
        wait_until(lambda: fenced in first.stats().executor_refusal, "who has it")
        assert all(undisturbed(rival, 50))
        reader.finish()
        assert [ExecutorLost] * NUM_STREAMS == [type(error) for error in reader.errors]
        rival.wait_ready()
        assert (1, 0) == (rival.stats().executor_sessions, rival.stats().executor_losses)
        assert (1, 1) == (first.stats().executor_sessions, first.stats().executor_fencings)
