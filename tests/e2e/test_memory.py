"""Memory of real services: sized in bytes, swapped to the host, and judged by the advisor."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem_client import Client
from tests.e2e.cluster import ROOT, Cluster, environment
from tests.e2e.conftest import running
from tests.waiting import wait_until

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 40, 30, 16
PROMPT = [5 + i % 90 for i in range(40)]
STEP_S = 0.04
"""
Seconds between steps while a server is watched; at this pace it has work for a minute and a half.
"""


def bytes_per_block(model) -> int:
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * config["num_hidden_layers"] * BLOCK_SIZE * heads * head_dim * 4


@pytest.fixture(scope="module")
def swapping(tiny_model, tmp_path_factory):
    """Yield the tiny model with the bytes of 40 blocks and a dummy, and of 30 host blocks."""
    block = bytes_per_block(tiny_model) / 2**30
    limits = [
        f"--buffer-size-gb={(NUM_BLOCKS + 1.5) * block:.12f}",
        f"--swap-space-gb={(NUM_HOST_BLOCKS + 0.5) * block:.12f}",
        "--max-model-len=320",
        "--preset=deploy-latency",
    ]
    scheduler = [
        "--preemption-mode=swap",
        "--schedule-conservativeness=0",
        "--memory-threshold=1.0",
    ]
    folder = tmp_path_factory.mktemp("swapping")
    yield from running(Cluster(tiny_model, folder, limits, scheduler))


@contextlib.contextmanager
def completions(cluster, num_requests: int):
    """
    Yield futures of the tokens of that many requests, all in the system when the block begins; the
    gate is closed then, so that no step computes before the block opens it.
    """

    def complete(seed: int) -> list[int]:
        asked = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": True}
        return client.complete(token_ids=[*PROMPT, seed], seed=seed, **asked).token_ids

    with (
        Client(cluster.address) as client,
        ThreadPoolExecutor(num_requests) as pool,
        cluster.held(),
    ):
        work = [pool.submit(complete, seed) for seed in range(num_requests)]
        wait_until(lambda: cluster.num_requests() == num_requests, "all of them at once")
        yield work


@contextlib.contextmanager
def advisor(cluster, *flags: str):
    address = f"--admin-address={cluster.admin_address}"
    command = [sys.executable, "-m", "tandem_client", "config", "advise", address, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes) as process:
        yield process


def advise_slowly(cluster) -> dict:
    """Return a report on a server that computes only a few steps while it is watched."""
    with advisor(cluster, "--seconds=1.5", "--json") as process:
        while process.poll() is None:
            cluster.gate.allow(1)
            time.sleep(STEP_S)
        assert (0, "") == (process.returncode, process.stderr.read())
        return json.load(process.stdout)


@pytest.mark.slow
class TestSizedServices:
    def test_bytes_become_blocks_on_both_sides(self, swapping):
        """
        The scheduler serves with the blocks and host blocks that fit the executor's bytes, and with
        its preset's batch size.
        """
        with swapping.admin() as admin:
            stats = admin.stats()
            settings = {one.name: one.value for one in admin.config()}
        assert (NUM_BLOCKS, NUM_HOST_BLOCKS) == (stats.total_blocks, stats.host_blocks)
        assert (NUM_BLOCKS, 16) == (settings["max_num_blocks"], settings["max_batch_size"])
        log = swapping.executor.log.read_text()
        for knob in ("max_num_blocks=40", "buffer_size_gb=", "mem_fraction_static=", "gpu_memory_"):
            assert knob in log

    def test_requests_that_take_turns_all_finish(self, swapping, idle):
        """
        Six requests that do not fit together are swapped out and in, and each gets all its tokens.
        """
        with completions(swapping, 6) as work:
            swapping.gate.open()
            found = [one.result() for one in work]
        assert [200] * 6 == list(map(len, found))
        assert 6 == len(set(map(tuple, found)))
        stats = idle(swapping)
        assert stats.preemptions > 0
        assert 0 < stats.swapped_in_blocks <= stats.swapped_out_blocks
        assert 0 == stats.used_host_blocks
        assert "is preempted (by swap)" in swapping.scheduler.log.read_text()

    def test_advisor_reads_a_running_server(self, swapping, idle):
        """
        The advisor sees retractions on a server short of memory and says which setting to raise; an
        idle server gets no advice.
        """
        with completions(swapping, 24) as work:
            report = wait_until(
                lambda: (found := advise_slowly(swapping))["load"]["retractions"] and found,
                "a report of retractions",
            )
            swapping.gate.open()
            assert [200] * 24 == [len(one.result()) for one in work]
        assert report["load"]["running"] > 0
        assert report["load"]["waiting"] > 0
        assert ("lpm", 16, 0) == tuple(
            report["load"][name]
            for name in ("schedule_policy", "max_batch_size", "conservativeness")
        )
        advice = {one["subject"]: one for one in report["advice"]}
        assert ("schedule_conservativeness", 1.3) == (
            advice["retractions"]["setting"],
            advice["retractions"]["value"],
        )
        idle(swapping)
        with advisor(swapping, "--seconds=0.2") as process:
            assert "ok      load: no request" in process.stdout.read()
