"""An executor of two ranks, of one stage or of two, behind a real scheduler."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest

from tandem_client import NO_RETRY, Client, KvMode, RetryPolicy
from tests.e2e.cluster import Cluster, wait_idle
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PROMPTS = ["def add(a, b):", "import os", "class Tree:\n    def", "for i in range(", "x = ["]
LONG = {rank: list(range(100 + rank, 612 + rank)) for rank in (0, 1)}
"""Prompts that take many steps, one for each test, so that no test finds another's cached."""
LIMITS = ["--max-num-blocks=256", "--max-batch-size=8"]


@pytest.fixture(scope="module", params=["tp-size", "pp-size"])
def cluster(request, bundled_model, tmp_path_factory):
    """Yield a scheduler whose executor has two ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*LIMITS, f"--{request.param}=2"]
    options = ["--lease-ms=1000", "--chunked-prefill-size=64"]
    cluster = Cluster(bundled_model, folder, flags, options)
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def alone(bundled_model, tmp_path_factory):
    """Yield a scheduler whose executor has one rank."""
    cluster = Cluster(bundled_model, tmp_path_factory.mktemp("alone"), LIMITS, [])
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def expected(alone):
    """Return the tokens of each prompt that one rank gives."""
    return completed(alone)


def completed_long(cluster, rank):
    """Complete the long prompt of a test, and return its tokens."""
    with cluster.client() as client:
        answer = client.complete(token_ids=LONG[rank], max_tokens=48, temperature=0)
        return list(answer.token_ids)


def completed(cluster, retry=NO_RETRY):
    """Complete all prompts at once, and return the tokens of each."""
    found: dict[str, list[int]] = {}

    def complete(prompt):
        with Client(cluster.address, retry=retry) as client:
            answer = client.complete(prompt, max_tokens=48, temperature=0)
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

    def test_streams_go_on_after_a_rank_is_lost(self, cluster, expected):
        """
        After rank 1 is killed amid requests the executor ends, and with its successor all streams
        go on with the right tokens.
        """
        got: dict[str, dict[str, list[int]]] = {}
        cluster.gate.allow(10)
        running = threading.Thread(target=lambda: got.update(all=completed(cluster)))
        running.start()
        wait_until(lambda: cluster.num_requests() == len(PROMPTS), "all requests to be taken")
        second_rank(cluster).kill()
        wait_until(lambda: cluster.executor.process.poll() is not None, "rank 0 to end", 60)
        cluster.gate.open()
        cluster.start_executor()
        running.join()
        assert expected == got["all"]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_prompt_is_computed_again_after_a_rank_stops_in_it(self, cluster, alone, rank):
        """
        A rank that is stopped while a prompt is half computed is missed, though the other one waits
        for it inside a sum; the executor ends, and its successor computes the prompt.
        """
        got: list[list[int]] = []
        cluster.gate.allow(2)
        running = threading.Thread(target=lambda: got.append(completed_long(cluster, rank)))
        running.start()
        wait_until(lambda: cluster.stats().used_blocks, "the prompt to be begun")
        os.kill(cluster.executor.family()[rank].pid, signal.SIGSTOP)
        (request,) = cluster.requests().values()
        assert not request.output_tokens
        cluster.gate.open()
        wait_until(lambda: cluster.executor.process.poll() is not None, "rank 0 to end", 60)
        cluster.start_executor()
        running.join()
        assert [completed_long(alone, rank)] == got

    def test_another_scheduler_takes_all_ranks_over(self, cluster, expected):
        """
        After a scheduler is killed amid requests all ranks of its executor begin a session of its
        successor together, and all streams go on with the right tokens.
        """
        got: dict[str, list[int]] = {}
        patient = RetryPolicy()
        with cluster.held(10):
            running = threading.Thread(target=lambda: got.update(completed(cluster, patient)))
            running.start()
            wait_until(lambda: cluster.num_requests() == len(PROMPTS), "all requests to be taken")
            cluster.scheduler.kill()
            cluster.start_scheduler("--take-over")
        running.join()
        assert expected == got
        assert cluster.executor.process.poll() is None
