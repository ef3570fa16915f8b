"""A client process that is killed in any state of its request leaves nothing behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from tests.e2e.cluster import ROOT, Cluster, environment
from tests.waiting import wait_until

MAX_TOKENS = 1500
NUM_STEPS = 5
"""
Number of steps that suffices for the first token of a prompt of 16 ids, and for a third of 450 ids.
"""


@pytest.fixture(scope="module")
def two_slots(bundled_model, tmp_path_factory):
    """
    Yield the bundled model with two requests at once and prompts in chunks of 32, so that each
    state of a request lasts long enough.
    """
    limits = ["--max-batch-size=2", "--max-total-tokens=32", "--max-num-blocks=256"]
    cluster = Cluster(bundled_model, tmp_path_factory.mktemp("two-slots"), limits, [])
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def reader(cluster, num_ids):
    """Start a client process that reads one long stream; kill it at the end."""
    arguments = [cluster.address, str(num_ids), str(MAX_TOKENS)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.recovery.reader", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def hear(process, name):
    """Wait until the client has seen an event of this name."""
    for line in process.stdout:
        if line.strip() == name:
            return
    raise AssertionError(f"the stream ended before {name}")


@pytest.mark.slow
class TestKilledClient:
    @pytest.mark.parametrize(
        ("num_ids", "event"), [(450, "Scheduled"), (16, "Delta")], ids=["prefill", "decode"]
    )
    def test_running_request_gives_its_blocks_back(self, two_slots, idle, num_ids, event):
        """
        Kill -9 of a client in prefill or decode frees its blocks long before its output is
        complete.
        """
        before = idle(two_slots)
        with two_slots.held(NUM_STEPS), reader(two_slots, num_ids) as process:
            hear(process, event)
            assert two_slots.stats().used_blocks > 0
            process.kill()
            wait_until(lambda: two_slots.stats().running_requests == 0, "the core to know")
        after = idle(two_slots)

        assert before.accepted_requests + 1 == after.accepted_requests
        if event == "Scheduled":
            assert after.prefill_tokens - before.prefill_tokens < num_ids

    def test_waiting_request_leaves_the_queue(self, two_slots, idle):
        """
        A client that waits and is killed with -9 leaves the queue; the running requests go on.
        """
        idle(two_slots)
        with (
            two_slots.held(),
            reader(two_slots, 16) as one,
            reader(two_slots, 16) as two,
        ):
            wait_until(lambda: two_slots.num_requests() == 2, "two that came")
            two_slots.gate.allow(NUM_STEPS)
            hear(one, "Delta")
            hear(two, "Delta")
            with reader(two_slots, 16) as third:
                hear(third, "Queued")
                wait_until(lambda: two_slots.stats().waiting_requests == 1, "one waits")
                third.kill()
                wait_until(lambda: two_slots.stats().waiting_requests == 0, "none waits")
            assert 2 == two_slots.stats().running_requests
            two_slots.gate.open()
            hear(one, "Delta")
            hear(two, "Delta")
        idle(two_slots)
