"""An executor of two ranks, of one stage or of two, behind a real scheduler."""

from __future__ import annotations

import signal
import threading

import psutil
import pytest

from tandem_client import KvMode
from tests.e2e.cluster import Cluster, wait_idle
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = ["def add(a, b):", "import os", "class Tree:\n    def", "for i in range(", "x = ["]
LIMITS = ["--max-num-blocks=256", "--max-batch-size=8"]


@pytest.fixture(scope="module", params=["tp-size", "pp-size"])
def cluster(request, bundled_model, tmp_path_factory):
    """Yield a scheduler whose executor has two ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*LIMITS, f"--{request.param}=2"]
    cluster = Cluster(bundled_model, folder, flags, ["--lease-ms=1000"])
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def expected(bundled_model, tmp_path_factory):
    """Return the tokens of each prompt that one rank gives."""
    alone = Cluster(bundled_model, tmp_path_factory.mktemp("alone"), LIMITS, [])
    try:
        alone.start_executor()
        return completed(alone)
    finally:
        alone.close()


def completed(cluster, max_tokens=48):
    """Complete all prompts at once, and return the tokens of each."""
    found: dict[str, list[int]] = {}

    def complete(prompt):
        with cluster.client() as client:
            answer = client.complete(prompt, max_tokens=max_tokens, temperature=0)
            found[prompt] = list(answer.token_ids)

    threads = [threading.Thread(target=complete, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def second_rank(cluster) -> psutil.Process:
    _, *others = cluster.executor.family()
    return others[0]


class TestRanks:
    def test_two_ranks_give_the_tokens_of_one(self, cluster, expected):
        """
        Greedy requests, several at a time, get the same tokens from two ranks as from one.
        """
        assert expected == completed(cluster)
        wait_idle(cluster.stats)

    def test_suspension_takes_all_ranks(self, cluster, expected):
        """
        Suspend is answered after all ranks gave their KV memory back, and after resume they go on.
        """
        with cluster.admin() as admin:
            admin.suspend(KvMode.OFFLOAD)
            admin.resume()
        assert expected == completed(cluster)
        log = cluster.executor.log.read_text()
        assert 2 == log.count("kv_suspended")
        assert 2 == log.count("kv_resumed")

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
    def test_streams_go_on_after_a_rank_is_lost(self, cluster, expected, number):
        """
        After rank 1 is killed or stopped amid requests the executor ends, and with its successor
        all streams go on with the right tokens.
        """
        got: dict[str, dict[str, list[int]]] = {}
        cluster.gate.allow(10)
        running = threading.Thread(target=lambda: got.update(all=completed(cluster)))
        running.start()
        wait_until(lambda: cluster.num_requests() == len(PROMPTS), "all requests to be taken")
        second_rank(cluster).send_signal(number)
        wait_until(lambda: cluster.executor.process.poll() is not None, "rank 0 to end", 60)
        cluster.gate.open()
        cluster.start_executor()
        running.join()
        assert expected == got["all"]
