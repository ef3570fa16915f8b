"""`tandem doctor`: what it finds on this machine and of a running server."""

from __future__ import annotations

import json
import socket
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from tandem.admin.v1 import executors_pb2
from tandem.error_codes import PermissionDenied, Unauthenticated
from tandem.errors import InternalError, InvalidModel
from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tandem_client.cli import doctor
from tandem_client.cli.app import app
from tests.certificates import Authority
from tests.clients.python.fake_admin import EXECUTORS
from tests.clients.python.fake_server import PATIENCE_S, fake_server

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

    def test_each_executor_is_told_of(self, run, server):
        """
        A line per executor says whether it serves, and why not: that is a warning where others do.
        """
        server.seen.executors = list(EXECUTORS)
        findings = found_at(server.address, run)

        assert ["ok", "warn"] == [findings[f"executor box:{n}"]["verdict"] for n in (1, 2)]
        assert "serves (by box:3, which stands by)" == findings["executor box:1"]["fact"]
        assert "is not used: it serves another model" == findings["executor box:2"]["fact"]

    def test_executors_of_an_unready_server_are_told_of(self, run, server):
        """
        A server that is not ready has these lines too, with what to do.
        """
        server.set_health("tandem.ready", False)
        server.seen.executors = [
            executors_pb2.ExecutorSummary(address="a:1", state="EXECUTOR_STATE_CONNECTING")
        ]
        findings = found_at(server.address, run, exit_code=1)

        assert "has not been reached for 0 s" == findings["executor a:1"]["fact"]
        assert (
            "start it, or remove it: tandem executors remove a:1"
            == (findings["executor a:1"]["advice"])
        )

    def test_older_server_has_no_such_lines(self, run, server):
        """
        A server that does not list its executors passes without them.
        """
        server.seen.executors = None
        assert not [one for one in found_at(server.address, run) if one.startswith("executor ")]

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

    @pytest.mark.parametrize("refusal", [PermissionDenied, Unauthenticated])
    def test_token_of_an_operator_alone_sees_what_it_may(self, run, server, refusal, monkeypatch):
        """
        A public port that refuses the credential answers: the missing role is a warning, and the
        admin port is looked at all the same.
        """
        monkeypatch.setattr("tests.clients.python.fake_admin.SETTINGS", SETTINGS)
        server.seen.model_error = refusal("GetModel needs the role 'generate'")
        findings = found_at(server.address, run)

        assert "warn" == findings["server"]["verdict"]
        assert f"{server.address} answers: {refusal.reason}" in findings["server"]["fact"]
        assert "a token with the role 'generate'" in findings["server"]["advice"]
        assert ("ok", True) == (findings["admin"]["verdict"], "security" in findings)

    @pytest.mark.parametrize("refusal", [PermissionDenied, Unauthenticated])
    def test_token_of_a_user_alone_sees_what_it_may(self, run, server, refusal):
        """
        An admin port that refuses the credential answers, and the missing role is a warning.
        """
        server.seen.operator_error = refusal("GetStats needs the role 'operate'")
        findings = found_at(server.address, run)

        assert ["ok", "warn"] == [findings[one]["verdict"] for one in ("server", "admin")]
        assert f"{server.address} answers: {refusal.reason}" in findings["admin"]["fact"]
        assert "a token with the role 'operate'" in findings["admin"]["advice"]

    def test_failure_of_a_port_hides_nothing_of_the_other(self, run, server):
        """
        A server that fails fails the check, and the admin port is looked at all the same; one that
        fails there is told with its error.
        """
        server.seen.model_error = InternalError("a bug")
        failed = found_at(server.address, run, exit_code=1)
        assert ["fail", "ok"] == [failed[one]["verdict"] for one in ("server", "admin")]

        server.seen.model_error, server.seen.operator_error = None, InternalError("a bug")
        assert "answers: INTERNAL: a bug" in found_at(server.address, run)["admin"]["fact"]

    def test_port_of_tls_is_told(self, run, tmp_path):
        """
        Without --ca, a server that speaks TLS is not taken for none, nor for another program.
        """
        pair = Authority(tmp_path).issue("server")
        files = ServerTls(certificate=pair.certificate, key=pair.key)
        with fake_server(server_credentials(files)) as encrypted:
            findings = found_at(encrypted.address, run)
            assert f"{encrypted.address} speaks TLS" == findings["server"]["fact"]
            assert ("warn", "give --ca FILE") == (
                findings["server"]["verdict"],
                findings["server"]["advice"],
            )
            demanded = run("doctor", "--server", "--address", encrypted.address)
            assert 1 == demanded.exit_code

    def test_admin_port_of_tls_is_told(self, run, server, tmp_path):
        """
        The same goes for the admin port.
        """
        pair = Authority(tmp_path).issue("server")
        files = ServerTls(certificate=pair.certificate, key=pair.key)
        with fake_server(server_credentials(files)) as encrypted:
            findings = found_at(server.address, run, admin_address=encrypted.address)
        assert f"{encrypted.address} speaks TLS" == findings["admin"]["fact"]

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


def found_at(address, run, *, admin_address=None, exit_code=0):
    """Run the command and return its findings by subject."""
    ports = ["--address", address, "--admin-address", admin_address or address]
    result = run("doctor", "--json", *ports)
    assert exit_code == result.exit_code, result.output
    return {f["subject"]: f for f in json.loads(result.stdout)}


class TestTorchProbe:
    @pytest.mark.slow
    def test_torch_is_described(self):
        """
        The probe reports torch's version and device.
        """
        (finding,) = doctor.check_torch()

        assert ("ok", "torch") == (finding.verdict, finding.subject)
        assert finding.fact.startswith(version("torch").split("+")[0])
