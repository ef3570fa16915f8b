"""The console as a process: flags, HTTPS, and warnings."""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

from tests.certificates import Authority
from tests.e2e.cluster import Process
from tests.waiting import wait_until


@pytest.fixture
def start(tmp_path):
    """Start a console process with these flags."""
    processes = []

    def run(*flags):
        processes.append(Process("tandem_console", [*map(str, flags)], tmp_path, "console"))
        return processes[-1]

    yield run
    for process in processes:
        process.end()


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--admin-address=nowhere"], "nowhere"),
            (["--listen=nowhere"], "nowhere"),
            (["--tls-cert=/dev/null"], "tls_cert and tls_key"),
            (["--scheduler-ca=/none"], "/none"),
            (["--interval-s=0"], "interval_s"),
        ],
    )
    def test_wrong_one_is_refused_in_a_line(self, flags, said):
        """
        A flag that cannot work ends the process with exit code 2 and one line that names it.
        """
        command = [sys.executable, "-m", "tandem_console", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert 2 == ended.returncode
        assert said in ended.stderr
        assert 1 == ended.stderr.count("\n"), ended.stderr


class TestProcess:
    def test_console_beyond_loopback_warns_without_tls(self, start, server):
        """
        A console that others can reach in plain text says so, since tokens cross the network.
        """
        process = start("--listen=0.0.0.0:0", f"--admin-address={server.address}")
        process.addresses()
        wait_until(lambda: "listening_unprotected" in process.log.read_text(), "the warning")
        assert "with the tokens in it" in process.log.read_text()

    def test_https_keeps_cookies_off_plain_connections(self, start, server, tmp_path):
        """
        With a certificate the console speaks HTTPS, and its cookie is never sent without it.
        """
        authority = Authority(tmp_path)
        pair = authority.issue("server")
        server.seen.operator_token = "token"
        process = start(
            "--listen=127.0.0.1:0",
            f"--admin-address={server.address}",
            f"--tls-cert={pair.certificate}",
            f"--tls-key={pair.key}",
        )
        with httpx.Client(
            base_url=f"https://{process.addresses()['address']}",
            verify=ssl.create_default_context(cafile=authority.file),
            trust_env=False,
        ) as http:
            answer = http.post("/login", json={"token": "token"})
            assert (204, 200) == (answer.status_code, http.get("/snapshot").status_code)
            assert "secure" in answer.headers["set-cookie"].lower().split("; ")
        assert "listening_unprotected" not in process.log.read_text()

    def test_signal_ends_the_streams_of_open_pages(self, start, server):
        """
        At SIGINT every open stream ends whole, the console exits with 0, and no fault is logged.
        """
        process = start("--listen=127.0.0.1:0", f"--admin-address={server.address}")
        url = f"http://{process.addresses()['address']}"
        with httpx.Client(base_url=url, trust_env=False) as http, ExitStack() as pages:
            streams = [pages.enter_context(http.stream("GET", "/events")) for _ in range(2)]
            parts = [stream.iter_text() for stream in streams]
            assert all("data:" in next(part) for part in parts)
            process.process.send_signal(signal.SIGINT)
            for part in parts:
                assert "data:" in "".join(part)
        assert 0 == process.process.wait(30)
        assert "Traceback" not in process.log.read_text()
