"""The units of systemd: what systemd-analyze says of them, and what their commands do when run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.images.health import fault, options
from kernels.cpu_extension.build import cache_folder
from tandem_client import Client
from tests.deploy.flags import PREFIXES, unknown_flags, unknown_variables
from tests.deploy.systemd.unit_file import ROOT, UNITS, Unit
from tests.ports import free_port
from tests.programs import is_missing
from tests.waiting import wait_until

PYTHON = "/opt/tandem/bin/python"
EXPOSURE_LIMIT = 20
"""Most exposure in tenths, of 100, that `systemd-analyze security` may find: it calls 2.0 `OK`."""
GRACE = re.compile(r"--(?:drain|stop)-grace-s=(\d+)")
TOKEN = "5e" * 32
MARGIN_S = 10
"""Seconds that a service has for its end after its grace time is over."""


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze; see `is_missing` for a machine without it."""
    program = shutil.which("systemd-analyze")
    if program is None:
        is_missing("systemd-analyze is not here; Debian's package `systemd` has it")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def installed(folder: Path, name: str) -> Path:
    """Copy a unit, with the interpreter of this machine in it."""
    copy = folder / f"{name}.service"
    copy.write_text(UNITS[name].read_text().replace(PYTHON, sys.executable))
    return copy


@pytest.mark.parametrize("name", UNITS)
class TestUnit:
    def test_is_verified_by_systemd(self, name: str, tmp_path: Path):
        """
        `systemd-analyze verify` has nothing to say about a unit.
        """
        for other in UNITS:
            installed(tmp_path, other)
        done = analyze("verify", "--recursive-errors=no", tmp_path / f"{name}.service")
        assert (0, "") == (done.returncode, done.stderr.strip())

    def test_exposure_is_low(self, name: str):
        """
        `systemd-analyze security` finds a unit's exposure to be low.
        """
        done = analyze(
            "security", "--offline=yes", f"--threshold={EXPOSURE_LIMIT}", str(UNITS[name])
        )
        assert 0 == done.returncode, done.stdout

    def test_flags_and_variables_are_those_of_the_service(self, name: str):
        """
        Each flag of ExecStart and each variable of the service's prefix is an option of it.
        """
        unit = Unit(UNITS[name])
        assert [] == unknown_flags(unit.module(), unit.command()[3:])
        if unit.module() in PREFIXES:
            names = [one for one in unit.environment() if one != "TANDEM_CACHE_DIR"]
            assert [] == unknown_variables(unit.module(), names)

    def test_service_may_drain_before_it_is_killed(self, name: str):
        """
        The time from SIGTERM to SIGKILL is the service's own grace time and some seconds more.
        """
        unit = Unit(UNITS[name])
        (grace_s,) = GRACE.findall(unit.one("ExecStart"))
        assert float(grace_s) + MARGIN_S <= unit.stop_timeout_s()


class TestPlantedFault:
    def test_unknown_key_is_seen(self, tmp_path: Path):
        """
        A key that systemd does not know, which it would ignore, is an error here.
        """
        copy = installed(tmp_path, "tandem-gateway")
        copy.write_text(copy.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
        assert "NoNewPrivilege" in analyze("verify", "--recursive-errors=no", copy).stderr

    def test_unit_without_protection_is_seen(self, tmp_path: Path):
        """
        A unit that only runs its command exceeds the exposure.
        """
        bare = tmp_path / "bare.service"
        bare.write_text("[Service]\nExecStart=/bin/true\n")
        done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_LIMIT}", str(bare))
        assert 0 != done.returncode


def test_drop_in_for_gpus_changes_a_unit_that_exists(tmp_path: Path):
    """
    The unit with its drop-in for GPUs is verified by systemd too.
    """
    unit = installed(tmp_path, "tandem-executor")
    folder = tmp_path / "tandem-executor.service.d"
    folder.mkdir()
    shutil.copy(ROOT / "deploy/systemd/tandem-executor-gpu.conf", folder / "gpu.conf")
    done = analyze("verify", "--recursive-errors=no", unit)
    assert (0, "") == (done.returncode, done.stderr.strip())


class Machine:
    """Paths and ports that take the place of those in the units."""

    def __init__(self, folder: Path) -> None:
        credentials = folder / "credentials"
        credentials.mkdir()
        (credentials / "link-token").write_text(f"{TOKEN}\n")
        self.folder = folder
        self.ports = {port: free_port() for port in (50051, 50052, 50061, 8000, 9464)}
        self.replaced = {
            PYTHON: sys.executable,
            "%d": str(credentials),
            "%C/tandem-executor": str(cache_folder(os.environ).parent),
            "/srv/tandem/model": str(ROOT / "deploy/models/tandem-py"),
        } | {f"127.0.0.1:{old}": f"127.0.0.1:{new}" for old, new in self.ports.items()}

    def placed(self, text: str) -> str:
        """Return a text of a unit with this machine's paths and ports."""
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    @contextmanager
    def started(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the command of a unit in the unit's environment alone."""
        unit = Unit(UNITS[name])
        kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "HOME") if key in os.environ}
        own = {key: self.placed(text) for key, text in unit.environment().items()}
        command = [self.placed(word) for word in unit.command()]
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=kept | own, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=unit.stop_timeout_s())
        assert 0 == code, log.read_text()

    def wait_ready(self, port: int) -> str:
        """Wait until the service of a unit's port is ready, and return its address."""
        address = f"127.0.0.1:{self.ports[port]}"
        wait_until(lambda: fault(options([address])) is None, f"{port} of the units to be ready")
        return address


@pytest.mark.slow
def test_commands_of_the_units_serve_a_stream_together(tmp_path: Path):
    """
    The commands of all units, run with their variables, stream a completion by gRPC and by HTTP,
    and end with 0 at SIGTERM.
    """
    machine = Machine(tmp_path)
    with (
        machine.started("tandem-executor"),
        machine.started("tandem-scheduler"),
        machine.started("tandem-gateway"),
    ):
        address = machine.wait_ready(50051)
        with Client(address) as client:
            stream = client.generate("import os", max_tokens=8, temperature=0, ignore_eos=True)
            assert 1 < len(list(stream.text))
        url = f"http://127.0.0.1:{machine.ports[8000]}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        wait_until(lambda: answers(opener, f"{url}/health"), "the gateway to be ready")
        asked = {"model": "model", "prompt": "import os", "max_tokens": 8, "stream": True}
        asked["model"] = json.load(opener.open(f"{url}/v1/models"))["data"][0]["id"]
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with opener.open(request, timeout=60) as answer:
            assert 1 < sum(line.startswith(b"data: {") for line in answer)


def answers(opener: urllib.request.OpenerDirector, url: str) -> bool:
    """Return whether a URL answers 200."""
    try:
        return bool(opener.open(url, timeout=5).status == 200)
    except OSError:
        return False
