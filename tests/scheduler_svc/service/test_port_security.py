"""Certificates and credentials of a whole service: what ends its start, what it warns of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import structlog
from structlog.testing import capture_logs

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.config.settings import SchedulerSettings
from scheduler_svc.service.port_security import check_files, warn_where_open
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.errors import InvalidConfig
from tests.certificates import Authority
from tests.scheduler_svc.frontend.identity.credentials import OPERATOR, USER, bearer, write_file
from tests.waiting import wait_until

DEADLINE_S = 60.0
EVERYWHERE = {"listen": "0.0.0.0:1", "admin_listen": "0.0.0.0:2", "metrics_listen": "0.0.0.0:3"}


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def security(ca: Authority, **changes: str | None) -> FrontendSecurity:
    """Return good files of both ports, with some of them changed."""
    server, tokens = ca.issue("server"), write_file(ca.file.parent)
    files = {"cert": server.certificate, "key": server.key, "client_ca": ca.file}
    values = {
        f"{prefix}tls_{name}": str(path)
        for prefix in ("", "admin_")
        for name, path in files.items()
    }
    return FrontendSecurity(**({"tokens_file": str(tokens)} | values | changes))


def warned(settings: FrontendSecurity) -> list[str]:
    """Return the settings whose addresses are warned of."""
    structlog.reset_defaults()
    with capture_logs() as logged:
        warn_where_open(EVERYWHERE, settings)
    return [line["setting"] for line in logged]


class TestFiles:
    def test_good_files_pass(self, ca):
        """
        Certificates, keys, CAs and credentials that can be used are accepted, as are none at all.
        """
        check_files(security(ca))
        check_files(FrontendSecurity())

    @pytest.mark.parametrize("prefix", ["", "admin_"])
    def test_each_wrong_file_is_refused(self, ca, prefix):
        """
        A file that cannot be used is refused, on either port, with its path.
        """
        expired, other = ca.issue_expired("expired"), ca.issue("other")
        wrong = {
            "has expired": {"tls_cert": str(expired.certificate), "tls_key": str(expired.key)},
            "does not belong to": {"tls_key": str(other.key)},
            "no certificate": {"tls_client_ca": str(other.key)},
            f"needs {prefix}tls_cert and {prefix}tls_key": {"tls_key": None},
        }
        for why, files in wrong.items():
            changes = {f"{prefix}{name}": path for name, path in files.items()}
            with pytest.raises(InvalidConfig, match=why):
                check_files(security(ca, **changes))

    def test_admin_port_has_the_public_files_by_default(self):
        """
        Each file of the admin port that is not set is that of the public port.
        """
        settings = SchedulerSettings(
            tls_cert=Path("a"), tls_key=Path("b"), admin_tls_client_ca=Path("c")
        ).frontend_security()
        assert (None, "a", "b", "c") == (
            settings.tls_client_ca,
            settings.admin_tls_cert,
            settings.admin_tls_key,
            settings.admin_tls_client_ca,
        )


class TestWarnings:
    @pytest.mark.parametrize(
        ("left_out", "expected"),
        [
            ((), ["metrics_listen"]),
            (("tokens_file",), ["metrics_listen"]),
            (("tls_client_ca",), ["metrics_listen"]),
            (("tokens_file", "tls_client_ca"), ["listen", "metrics_listen"]),
            (("tls_cert", "tls_key", "tls_client_ca"), ["listen", "metrics_listen"]),
            (("admin_tls_cert", "admin_tls_key", "admin_tls_client_ca"),
             ["admin_listen", "metrics_listen"]),
        ],
    )  # fmt: skip
    def test_each_port_without_encryption_or_credentials_is_warned_of(self, ca, left_out, expected):
        """
        A port that other machines reach needs TLS, and tokens or client certificates; metrics need
        their own.
        """
        assert expected == warned(security(ca, **dict.fromkeys(left_out)))

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (("cert", "key", "token"), []),
            (("cert", "key", "client_ca"), []),
            (("cert", "key"), ["metrics_listen"]),
            (("token",), ["metrics_listen"]),
        ],
    )
    def test_protected_metrics_are_not_warned_of(self, ca, names, expected):
        """
        The port of metrics with TLS, and with a token or client certificates, is as good as others.
        """
        server = ca.issue("metrics")
        token = ca.file.parent / "token"
        token.write_text("a-token-of-prometheus")
        files = {
            "cert": ("metrics_tls_cert", server.certificate),
            "key": ("metrics_tls_key", server.key),
            "client_ca": ("metrics_tls_client_ca", ca.file),
            "token": ("metrics_token_file", token),
        }
        given = {setting: str(path) for setting, path in map(files.__getitem__, names)}
        assert expected == warned(security(ca, **given))


def start(folder: Path, *flags: str) -> subprocess.Popen:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    command = [
        sys.executable, "-m", "scheduler_svc", "--executor", "127.0.0.1:9",
        "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--metrics-listen", "",
        "--ready-file", str(folder / "ready.json"), *flags,
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


class TestService:
    @pytest.mark.slow
    @pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["start", "dry-run"])
    def test_wrong_tokens_file_is_one_line_and_exit_code_2(self, tmp_path, flags):
        """
        A tokens file that cannot be used is named in one line, and no frontend is started.
        """
        path = tmp_path / "tokens.toml"
        process = start(tmp_path, "--tokens-file", str(path), *flags)
        _, stderr = process.communicate(timeout=DEADLINE_S)
        expected = f"INVALID_CONFIG: the tokens file {path}: cannot be read: No such file"
        assert expected in stderr
        assert "frontend_started" not in stderr
        assert 2 == process.returncode

    @pytest.mark.slow
    @pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["start", "dry-run"])
    @pytest.mark.parametrize("executors", ["10.0.0.7:1", "127.0.0.1:9,spare.example:1"])
    def test_executor_elsewhere_without_a_proof_is_one_line_and_exit_code_2(
        self, tmp_path, executors, flags
    ):
        """
        A service whose calls to an executor would leave the machine without a client certificate
        or a token does not start, also where that executor only stands by.
        """
        process = start(tmp_path, "--executor", executors, *flags)
        _, stderr = process.communicate(timeout=DEADLINE_S)
        away = executors.rpartition(",")[2]
        assert f"INVALID_CONFIG: executor: {away} cannot be told to be this machine" in stderr
        assert "frontend_started" not in stderr
        assert 2 == process.returncode

    @pytest.mark.parametrize("given", ["token", "switch"])
    def test_executor_elsewhere_with_a_token_or_said_to_be_safe_is_accepted(self, tmp_path, given):
        """A token, or the operator's word, is enough for a link that leaves the machine."""
        token = tmp_path / "token"
        token.write_text("a-token-of-the-link")
        flag = f"--link-token-file={token}" if given == "token" else "--insecure-link"
        process = start(tmp_path, "--executor", "10.0.0.7:1", flag, "--dry-run")
        _, stderr = process.communicate(timeout=DEADLINE_S)
        assert (0, "") == (process.returncode, stderr)

    @pytest.mark.slow
    def test_options_protect_the_ports_of_every_frontend(self, tmp_path, ca):
        """
        A service with certificates and a tokens file serves operators that have the token, and
        refuses all others, through TLS.
        """
        server = ca.issue("server")
        process = start(
            tmp_path, "--frontends", "2", "--tls-cert", str(server.certificate),
            "--tls-key", str(server.key), "--tokens-file", str(write_file(tmp_path)),
        )  # fmt: skip
        try:
            ready = tmp_path / "ready.json"
            wait_until(ready.exists, "a ready file", DEADLINE_S)
            address = json.loads(ready.read_text())["admin_address"]
            credentials = grpc.ssl_channel_credentials(ca.file.read_bytes())
            with grpc.secure_channel(address, credentials) as channel:
                stub = AdminServiceStub(channel)
                stub.GetStats(pb.GetStatsRequest(), metadata=bearer(OPERATOR), timeout=DEADLINE_S)
                for token, expected in ((USER, "PERMISSION_DENIED"), (None, "UNAUTHENTICATED")):
                    with pytest.raises(grpc.RpcError) as refused:
                        stub.GetStats(
                            pb.GetStatsRequest(), metadata=bearer(token), timeout=DEADLINE_S
                        )
                    assert expected == refused.value.code().name
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)
        assert 0 == process.returncode
