"""Profiles of a running service, as its operators get them."""

from __future__ import annotations

import concurrent.futures
import gzip
import json

import pytest
from typer.testing import CliRunner

from tandem.errors import ExecutorLost
from tandem_client.cli.app import app
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.conftest import running


def spans(trace):
    """How often each span of the trace is there, by name."""
    counts = {}
    for event in json.loads(gzip.decompress(trace))["traceEvents"]:
        if event.get("ph") == "X":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


class TestProfile:
    def test_trace_shows_the_parts_of_steps(self, bundled, idle):
        """
        A profile taken while a request runs is a Chrome trace with a span for each step, its parts
        and the operations in them; the request gets the tokens it gets without, and nothing is left.
        """
        asked = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 5}
        with (
            bundled.client() as client,
            bundled.admin() as admin,
            concurrent.futures.ThreadPoolExecutor(1) as threads,
        ):
            undisturbed = client.complete("def main():", **asked)
            profiling = threads.submit(admin.profile, num_steps=5, duration_s=30.0)
            while not profiling.done():
                profiled = client.complete("def main():", **asked)
                assert undisturbed.token_ids == profiled.token_ids
            profile = profiling.result()
            found = spans(profile.trace)
            assert 5 == profile.num_steps == found["tandem.step"] == found["tandem.forward"]
            assert 5 == found["tandem.sample"]
            assert any(name.startswith("aten::") for name in found)
            assert 0 == admin.stats().executor_losses
        idle(bundled)

    def test_command_without_requests_ends_with_an_empty_trace(self, bundled, tmp_path):
        """
        Where nothing is computed `tandem profile` ends after its seconds, and says why no step is in its trace.
        """
        trace = tmp_path / "trace.json.gz"
        result = CliRunner().invoke(
            app,
            [
                "profile",
                "--duration-s=0.2",
                f"--output={trace}",
                f"--admin-address={bundled.admin_address}",
            ],
        )
        assert 0 == result.exit_code, result.output
        assert "no step was computed" in result.stderr
        assert "tandem.step" not in spans(trace.read_bytes())


@pytest.fixture
def mortal(tiny_model, tmp_path):
    """A cluster whose executor may die."""
    limits = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=2"]
    yield from running(Cluster(tiny_model, tmp_path, limits, []))


@pytest.mark.slow
def test_executor_that_is_killed_ends_the_profile_alone(mortal):
    """
    Kill -9 in the middle of a profile: the operator is told EXECUTOR_LOST, and the requests go on
    with the next executor as ever.
    """
    asked = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    with (
        mortal.client() as client,
        mortal.admin() as admin,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        undisturbed = client.complete(token_ids=[5, 6, 7], **asked)
        told = []
        profiling = threads.submit(admin.profile, duration_s=60.0, on_progress=told.append)
        wait_until(lambda: told, "a profile that records")
        completing = threads.submit(client.complete, token_ids=[5, 6, 7], **asked)
        mortal.executor.kill()
        with pytest.raises(ExecutorLost):
            profiling.result()
        mortal.start_executor()
        assert undisturbed.token_ids == completing.result().token_ids
