"""Ranks that have nothing to do for long."""

from __future__ import annotations

import time

import pytest

from tandem_client import Client
from tests.e2e.cluster import Process
from tests.executor_svc.ranks.impatient import COLLECTIVE_S
from tests.executor_svc.ranks.processes import is_ready, start_pods
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["--tp-size=2", "--pp-size=2"])
def services(request, bundled_model, tmp_path):
    """Return an executor's two processes, and a scheduler before them."""
    module = "tests.executor_svc.ranks.impatient"
    started = start_pods(module, bundled_model, tmp_path, "--listen=127.0.0.1:0", request.param)
    executor = started[0].addresses()["address"]
    ports = [f"--{name}listen=127.0.0.1:0" for name in ("", "admin-", "metrics-")]
    started.append(
        Process("scheduler_svc", [f"--executor={executor}", *ports], tmp_path, "scheduler")
    )
    yield started
    for one in started:
        one.end()


class TestIdle:
    def test_ranks_serve_after_more_time_than_a_collective_waits(self, services):
        """
        Ranks without work wait in no collective: they outlast its time-out, and compute the same
        afterwards.
        """
        *ranks, scheduler = services
        address = scheduler.addresses()["address"]
        wait_until(lambda: is_ready(address), "the ranks to serve")
        with Client(address) as client:
            before = client.complete("import os", max_tokens=8, temperature=0)
            idle_until_s = time.monotonic() + 1.5 * COLLECTIVE_S
            wait_until(lambda: time.monotonic() > idle_until_s, "the time to pass")
            after = client.complete("import os", max_tokens=8, temperature=0)

        assert before.token_ids == after.token_ids
        assert [None, None] == [rank.process.poll() for rank in ranks]
