"""`tandem models`, `tandem show` and `tandem abort`."""

from __future__ import annotations

import json

import pytest

from tests.clients.python.fake_server import PATIENCE_S


class TestModels:
    def test_served_models_are_listed(self, run, server):
        """
        `tandem models` has a line per model under its headings; --json has all that is known.
        """
        result = run("models", "--address", server.address)
        headings, row, *_ = result.stdout.splitlines()
        assert (0, ["name", "revision"]) == (result.exit_code, headings.split()[:2])
        assert ["fake", "revision-1", "FakeForCausalLM", "float32", "512", "128"] == row.split()
        (model, *_) = json.loads(run("models", "--json", "--address", server.address).stdout)
        assert ("fake", [2]) == (model["name"], model["eos_token_ids"])

    def test_model_is_shown_with_limits_and_defaults(self, run, server):
        """
        `tandem show` prints a line per fact, defaults of requests too, without their seed.
        """
        lines = run("show", "--address", server.address).stdout.splitlines()
        assert {"name: fake", "max_model_len: 512", "eos_token_ids: 2"} <= set(lines)
        assert "default_params.max_tokens: 100" in lines
        assert not any("seed" in line for line in lines)
        shown = json.loads(run("show", "--json", "--address", server.address).stdout)
        assert 100 == shown["default_params"]["max_tokens"]

    def test_model_is_shown_by_its_name(self, run, server):
        """
        A name is asked for as it stands, and one that is not served is refused.
        """
        assert "name: fake\n" in run("show", "fake", "--address", server.address).stdout
        missing = run("show", "other", "--address", server.address)
        assert (4, True) == (missing.exit_code, "MODEL_NOT_FOUND" in missing.stderr)


class TestAbort:
    def test_tenant_is_sent(self, run, server):
        """
        Ids belong to tenants, so that the tenant goes with them.
        """
        run("abort", "live", "--tenant", "alice", "--address", server.address)
        assert [("live", "alice")] == [(one.request_id, one.tenant) for one in server.seen.aborted]

    def test_live_request_is_ended(self, run, server):
        """
        A live request is aborted, which is said.
        """
        result = run("abort", "live", "--address", server.address)
        assert (0, "live aborted\n", "") == (result.exit_code, result.stdout, result.stderr)

    def test_request_that_is_not_live_is_named_and_others_are_ended(self, run, server):
        """
        Each id is tried; one that is not live is named, and the exit code says so.
        """
        result = run("abort", "gone", "live", "--address", server.address)
        assert (4, "live aborted\n") == (result.exit_code, result.stdout)
        assert "REQUEST_NOT_FOUND: no live request has the id 'gone'" in result.stderr
        assert "1 of 2 requests were not live" in result.stderr

    @pytest.mark.slow
    def test_server_that_is_not_there_is_an_error(self, tandem):
        """
        Without a server the command ends with the exit code for that.
        """
        process = tandem("abort", "any", "--address", "127.0.0.1:1")
        _, said = process.communicate(timeout=PATIENCE_S)
        assert (3, True) == (process.returncode, "cannot reach 127.0.0.1:1" in said)
