"""`tandem top` and the console in front of real services: their numbers are those of GetStats."""

from __future__ import annotations

import contextlib
import json
import threading

import httpx
import pytest
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tests import model_zoo
from tests.clients.console.serving import console
from tests.e2e.cluster import Cluster
from tests.waiting import wait_until

LIMITS = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=2"]
STEPS = 3
"""Steps that run: the prompt's and two decodes, each of which brings a token."""


@pytest.fixture
def small(tmp_path):
    """A scheduler and an executor with a tiny model."""
    cluster = Cluster(model_zoo.llama_mha(tmp_path / "model"), tmp_path, LIMITS, [])
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


@pytest.mark.slow
def test_views_have_the_numbers_of_the_server(small):
    """
    While the executor is held, both views show the same requests, counters, steps and KV memory.
    """
    with small.client() as client, contextlib.ExitStack() as holding:
        holding.enter_context(small.held(STEPS))
        call = client.generate("one two three", max_tokens=50, ignore_eos=True, tenant="acme")
        reader = threading.Thread(target=lambda: list(call))
        reader.start()
        where = ("--admin-address", small.admin_address)
        wait_until(lambda: small.stats().output_tokens == STEPS, "the token of each step")
        stats = small.stats()
        result = CliRunner().invoke(app, ["top", "--once", "--json", "--interval-s=0.1", *where])
        top = json.loads(result.stdout)
        with console(small.admin_address) as url:
            page = httpx.get(f"{url}/look", trust_env=False).json()["view"]
        screen = CliRunner().invoke(app, ["top", "--once", "--interval-s=0.1", *where]).stdout
        holding.close()
        reader.join()
    for name in ("running_requests", "used_blocks", "output_tokens", "steps", "accepted_requests"):
        assert getattr(stats, name) == top[name] == page["stats"][name], name
    for told in (top, page):
        (request,) = told["requests"]
        assert ("acme", "DECODE") == (request["tenant"], request["state"])
        assert stats.steps == told["last_steps"][-1]["number"]
        assert [small.executor_address] == [one["address"] for one in told["executors"]]
    assert "acme" in screen
    assert "decode" in screen
