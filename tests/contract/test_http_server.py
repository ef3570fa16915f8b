"""The parts that HTTP servers in front of schedulers share: flags, the port, and the stop."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.errors import AddressInUse, InvalidConfig
from tandem.http_server.encryption import newest_credentials
from tandem.http_server.listening import listen
from tandem.http_server.settings import (
    SERVER_FILES,
    HttpServerSettings,
    add_port_flags,
    add_process_flags,
    check_files,
    common_values,
)
from tests.certificates import Authority
from tests.waiting import wait_until

FILES = SERVER_FILES | {"scheduler-ca": "", "scheduler-cert": "", "scheduler-key": ""}
SERVER = """
import asyncio
import sys
from pathlib import Path
from tandem.http_server.process import HttpLimits, serve
from tandem.http_server.settings import HttpServerSettings
from tandem.process.telemetry import configure_logging

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    is_endless = scope["path"] == "/endless"
    await send({"type": "http.response.body", "body": b"yes", "more_body": is_endless})
    if is_endless:
        await asyncio.Event().wait()

async def end_streams():
    print("streams end", flush=True)

configure_logging("error", "json")
settings = HttpServerSettings(listen="127.0.0.1:0", ready_file=Path(sys.argv[1]))
limits = HttpLimits(backlog=16, stop_s=1)
sys.exit(serve(
    app, settings, limits,
    on_listening=lambda address: print(address, Path(sys.argv[1]).exists(), flush=True),
    end_streams=end_streams,
))
"""


def read(*arguments: str) -> argparse.Namespace:
    """Read the flags that all HTTP servers have."""
    parser = argparse.ArgumentParser()
    add_port_flags(parser, "127.0.0.1:8", FILES)
    add_process_flags(parser)
    return parser.parse_args(arguments)


class TestFlags:
    def test_command_line_gives_every_common_setting(self, tmp_path):
        """
        Each common setting has a flag of its name, and defaults are those of the settings.
        """
        assert HttpServerSettings(listen="127.0.0.1:8") == HttpServerSettings(
            **common_values(read())
        )
        flags = {
            "listen": "[::]:1",
            **{flag.replace("-", "_"): tmp_path / flag for flag in FILES},
            "ready_file": tmp_path / "ready",
            "log_level": "debug",
            "log_format": "json",
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        assert flags == common_values(read(*words))

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["tls-cert"], "tls_cert and tls_key go together"),
            (["scheduler-ca", "scheduler-key"], "scheduler_cert and scheduler_key go together"),
            (["scheduler-cert", "scheduler-key"], "scheduler_cert needs scheduler_ca"),
        ],
    )
    def test_files_that_lack_others_are_refused(self, tmp_path, given, said):
        """
        A pair that is given by half, or a certificate for connections without encryption, is named.
        """
        path = tmp_path / "file"
        path.write_text("")
        with pytest.raises(InvalidConfig, match=said):
            check_files(read(*(f"--{flag}={path}" for flag in given)), FILES)

    def test_file_that_is_not_there_is_named(self, tmp_path):
        """
        A path of no file is refused with its flag.
        """
        with pytest.raises(InvalidConfig, match=r"^--scheduler-ca: .* is not a file$"):
            check_files(read(f"--scheduler-ca={tmp_path}"), FILES)


class TestListen:
    @pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
    def test_free_port_is_told(self, host):
        """
        With port 0 the address has the port that others connect to.
        """
        listener, address = listen(f"{host}:0")
        with listener:
            found, _, port = address.rpartition(":")
            assert host == found
            socket.create_connection((host.strip("[]"), int(port))).close()

    def test_address_that_is_taken_is_refused(self):
        """
        The address of another listener is an AddressInUse that names it.
        """
        listener, address = listen("127.0.0.1:0")
        with listener, pytest.raises(AddressInUse, match=address):
            listen(address)


class TestNewestCredentials:
    def test_same_object_until_files_change(self, tmp_path):
        """
        Two looks at unchanged files give the same credentials, and none without files.
        """
        authority = Authority(tmp_path)
        plain = HttpServerSettings(listen="127.0.0.1:0")
        assert newest_credentials(plain)() is None
        tls = HttpServerSettings(listen="127.0.0.1:0", scheduler_ca=authority.file)
        newest = newest_credentials(tls)
        assert newest() is not None
        assert newest() is newest()


def start(path: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a server that writes this ready file; return its process, and what it has written."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        wait_until(path.exists, "the ready file")
    except AssertionError:
        process.kill()
        raise
    return process, json.loads(path.read_text())


class TestServe:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_server_tells_its_address_serves_and_ends_well_on_a_signal(self, tmp_path, number):
        """
        The ready file is there before the address is told; a signal ends streams first, then the process, with 0.
        """
        path = tmp_path / "ready.json"
        process, ready = start(path)
        try:
            assert process.pid == ready["pid"]
            with httpx.Client(trust_env=False) as http:
                assert 200 == http.get(f"http://{ready['address']}/").status_code
            process.send_signal(number)
            told, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        assert [f"{ready['address']} True", "streams end"] == told.splitlines()
        assert 0 == process.returncode

    def test_answer_that_does_not_end_is_cut_off_at_the_stop(self, tmp_path):
        """
        An answer that goes on after the time of a stop is no fault: the process ends with 0, without a traceback.
        """
        process, ready = start(tmp_path / "ready.json")
        try:
            with (
                httpx.Client(trust_env=False) as http,
                http.stream("GET", f"http://{ready['address']}/endless") as answer,
            ):
                assert "yes" == next(answer.iter_text())
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=30)
        finally:
            process.kill()
        assert (0, False) == (process.returncode, "Traceback" in said), said
