"""`tandem doctor`: what it finds on this machine and of a running server."""

from __future__ import annotations

import json
import socket
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from tandem.errors import InvalidModel
from tandem_client.cli import doctor
from tandem_client.cli.app import app
from tests.clients.python.fake_server import PATIENCE_S

SETTINGS = [
    ("listen", '"0.0.0.0:50051"', "flag"),
    ("admin_listen", '"127.0.0.1:50052"', "default"),
    ("metrics_listen", "null", "flag"),
]


class TestSecurity:
    def test_server_that_others_can_reach_is_a_warning(self, server, monkeypatch):
        """
        Each address beyond loopback is warned about: nothing there is authenticated or encrypted.
        """
        monkeypatch.setattr("tests.clients.python.fake_admin.SETTINGS", SETTINGS)
        monkeypatch.setattr(doctor, "check_torch", lambda: ())
        monkeypatch.setattr(doctor, "TIMEOUT_S", PATIENCE_S)
        address = ["--address", server.address, "--admin-address", server.address]
        found = json.loads(CliRunner().invoke(app, ["doctor", "--json", *address]).stdout)
        (warning,) = (one for one in found if one["subject"] == "security")

        assert "warn" == warning["verdict"]
        assert warning["fact"].startswith("listen 0.0.0.0:50051: other machines can reach")


class TestDoctor:
    @pytest.fixture(autouse=True)
    def quick_torch_probe(self, monkeypatch):
        """The probe imports torch, which takes seconds; TestTorchProbe runs the real one."""
        said = json.dumps({"version": "9", "cuda": "Fake GPU"})
        monkeypatch.setattr(doctor, "PROBE_TORCH", f"print({said!r})")
        monkeypatch.setattr(doctor, "TIMEOUT_S", PATIENCE_S)  # the server is this busy process

    def test_server_that_is_well_passes(self, run, server):
        """
        A healthy server is described, and the command exits 0.
        """
        address = ["--address", server.address, "--admin-address", server.address]
        result = run("doctor", "--json", "--server", *address)
        findings = {f["subject"]: f for f in json.loads(result.stdout)}

        assert 0 == result.exit_code
        assert "ok" == findings["server"]["verdict"]
        assert "FakeForCausalLM" in findings["server"]["fact"]
        assert "2 running" in findings["admin"]["fact"]

    @pytest.mark.parametrize("refusal", ["", "scheduler b has taken the executor over"])
    def test_unready_server_fails_with_advice(self, run, server, refusal):
        """
        A server that is up but not ready fails, with what it says itself or what to look at.
        """
        server.set_health("tandem.ready", False)
        server.seen.executor_refusal = refusal
        result = run("doctor", "--address", server.address, "--admin-address", server.address)

        assert 1 == result.exit_code
        assert f"is not ready; {refusal or 'its executor is missing'}" in result.stdout

    def test_server_of_a_model_it_cannot_serve_says_why(self, run, server):
        """
        A server with a broken chat template is not taken for one with a late executor.
        """
        server.set_health("tandem.ready", False)
        server.seen.model_error = InvalidModel("the chat template is invalid in line 1")
        result = run("doctor", "--address", server.address, "--admin-address", server.address)

        assert "is not ready; INVALID_MODEL: the chat template is invalid" in result.stdout

    def test_taken_port_is_a_warning(self, run):
        """
        A port that something else holds is warned about; without --server no server is needed.
        """
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            result = run("doctor", "--json", "--address", "127.0.0.1:1", "--admin-address", taken)
        ports = {
            f["fact"]: f["verdict"] for f in json.loads(result.stdout) if f["subject"] == "port"
        }

        assert 0 == result.exit_code
        assert "warn" == ports[f"{taken} is taken"]

    def test_demanded_server_must_run(self, run):
        """
        With --server a missing server fails.
        """
        result = run("doctor", "--server", "--address", "127.0.0.1:1")

        assert 1 == result.exit_code


class TestTorchProbe:
    def test_torch_is_described(self):
        """
        The probe reports torch's version and device.
        """
        (finding,) = doctor.check_torch()

        assert ("ok", "torch") == (finding.verdict, finding.subject)
        assert finding.fact.startswith(version("torch").split("+")[0])
