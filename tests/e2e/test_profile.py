"""Profiles of a running service, as its operators get them."""

from __future__ import annotations

import concurrent.futures
import gzip
import json

import pytest
from typer.testing import CliRunner

from tandem_client.cli.app import app


def spans(trace):
    """Return the number of spans of the trace by name."""
    counts = {}
    for event in json.loads(gzip.decompress(trace))["traceEvents"]:
        if event.get("ph") == "X":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


class TestProfile:
    @pytest.mark.slow
    def test_trace_shows_the_parts_of_steps(self, bundled, idle):
        """
        A profile taken while a request runs is a Chrome trace with a span for each step, its parts
        and the operations in them; the request gets the same tokens as without, and nothing is
        left.
        """
        asked = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 5}
        with (
            bundled.client() as client,
            bundled.admin() as admin,
            concurrent.futures.ThreadPoolExecutor(1) as threads,
        ):
            undisturbed = client.complete("def main():", **asked)
            profiling = threads.submit(admin.profile, num_steps=5, duration_s=60.0)
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

    def test_command_without_requests_fails_without_a_file(self, bundled, tmp_path):
        """
        The command `tandem profile` on an idle server ends after its seconds, says why, and writes
        no file.
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
        assert 1 == result.exit_code, result.output
        assert "nothing was recorded: no step ran" in result.stderr
        assert not trace.exists()
