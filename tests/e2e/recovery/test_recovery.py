"""An executor that is absent at first, dies, comes back, or stays away."""

from __future__ import annotations

import concurrent.futures
import contextlib

import pytest

from tandem.errors import ExecutorLost, NoExecutor
from tandem_client import Delta, FinishReason
from tests.e2e.cluster import Cluster
from tests.waiting import wait_until

RECOVERY_S = 2.0
NUM_STEPS = 30
"""Number of steps that suffices for the events before an executor dies, and ends no stream."""


@pytest.fixture(scope="module")
def fragile(bundled_model, tmp_path_factory):
    """Yield a scheduler of the bundled model with an executor that tests start and kill."""
    folder = tmp_path_factory.mktemp("fragile")
    cluster = Cluster(bundled_model, folder, ["--max-num-blocks=256"], ["--lease-ms=1000"])
    yield cluster
    cluster.close()


def refusal(cluster):
    """Return the error that a request gets now."""
    with cluster.client() as client:
        try:
            client.complete("x", max_tokens=1)
        except (NoExecutor, ExecutorLost) as error:
            return error
    return None


@contextlib.contextmanager
def profiled(cluster):
    """
    Yield the call of an operator that records a profile; it is recording when the block begins.
    """
    told = []
    with cluster.admin() as admin, concurrent.futures.ThreadPoolExecutor(1) as threads:
        call = threads.submit(
            admin.profile, num_steps=100, duration_s=60.0, on_progress=told.append
        )
        wait_until(lambda: told, "a profile that records")
        yield call


@pytest.mark.slow
class TestExecutorLife:
    def test_life_of_an_executor(self, fragile, idle):
        """
        Requests get NO_EXECUTOR without an executor; streams of one that is killed and restarted go
        on without a lost or repeated token, and a profile that was being recorded ends with
        EXECUTOR_LOST; an executor gone for longer than the recovery timeout fails them with
        EXECUTOR_LOST; one that is back serves again.
        """
        unserved = refusal(fragile)
        assert isinstance(unserved, NoExecutor)
        assert "UNAVAILABLE" == unserved.code
        assert unserved.retry_after_s > 0

        fragile.start_executor()
        with fragile.client() as client:
            expected = client.complete(
                "def fibonacci(n):", max_tokens=200, ignore_eos=True, temperature=0.0
            )
            with profiled(fragile) as profile:
                self.kill_and_restart(fragile, client, expected)
                assert isinstance(profile.exception(), ExecutorLost)
            idle(fragile)

        fragile.scheduler.end()
        fragile.start_scheduler(f"--recovery-timeout-s={RECOVERY_S}")
        wait_until(fragile.is_ready, "tandem.ready")
        with fragile.client() as client:
            with fragile.held(NUM_STEPS):
                stream = client.generate("x", max_tokens=1000, ignore_eos=True)
                wait_until(lambda: isinstance(next(stream), Delta), "the first token")
                fragile.executor.kill()
            with pytest.raises(ExecutorLost) as lost:
                list(stream)
        assert "UNAVAILABLE" == lost.value.code
        assert refusal(fragile) is not None

        fragile.start_executor()
        wait_until(lambda: refusal(fragile) is None, "service")
        idle(fragile)

    def kill_and_restart(self, cluster, client, expected):
        """Kill the executor in the middle of a stream, start another, and compare the output."""
        ids = []

        def take(event):
            assert len(ids) == event.first_token_offset
            ids.extend(event.token_ids)

        with cluster.held(NUM_STEPS):
            stream = client.generate(
                "def fibonacci(n):", max_tokens=200, ignore_eos=True, temperature=0.0
            )
            while len(ids) < 20:
                event = next(stream)
                if isinstance(event, Delta):
                    take(event)
            cluster.executor.kill()
        cluster.start_executor()
        for event in stream:
            if isinstance(event, Delta):
                take(event)

        assert 200 == stream.done.usage.output_tokens
        assert FinishReason.MAX_TOKENS == stream.finished.reason
        assert list(expected.token_ids) == ids
