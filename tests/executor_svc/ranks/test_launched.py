"""Ranks that a launcher starts, one by one."""

from __future__ import annotations

import signal

import grpc
import pytest

from tests.executor_svc.ranks.processes import GONE_S, start_pods
from tests.executor_svc.server.test_process import wait_ready

pytestmark = pytest.mark.slow


@pytest.fixture
def pods(bundled_model, tmp_path):
    """Return two ranks that serve."""
    flags = ["--listen=127.0.0.1:0", "--tp-size=2"]
    pods = start_pods("executor_svc", bundled_model, tmp_path, *flags)
    with grpc.insecure_channel(pods[0].addresses()["address"]) as channel:
        wait_ready(channel)
    yield pods
    for pod in pods:
        pod.end()


class TestLaunched:
    def test_signalled_ranks_end_in_good_order(self, pods):
        """
        Ranks that all get SIGTERM at once end with exit code 0, rank 1 after rank 0 has.
        """
        for pod in reversed(pods):
            pod.process.send_signal(signal.SIGTERM)
        assert [0, 0] == [pod.process.wait(GONE_S) for pod in pods]

    @pytest.mark.parametrize("killed", [0, 1])
    def test_killed_rank_ends_the_other(self, pods, killed):
        """
        After kill -9 of one the other ends too, with exit code 1, and says why.
        """
        pods[killed].kill()
        other = pods[1 - killed]
        assert 1 == other.process.wait(GONE_S)
        assert f"INTERNAL: rank {killed} of the model is gone" in other.log.read_text()
