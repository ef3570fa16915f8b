"""Child processes of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tandem_client.cli.failures import ExitCode
from tandem_client.cli.services import Service, ServiceFailed

SLEEPER = "import json,os,pathlib,sys,time; p = pathlib.Path(sys.argv[-1]); t = p.with_suffix('.tmp'); t.write_text(json.dumps({'address': 'a:1', 'pid': os.getpid()})); t.rename(p); time.sleep(600)"
PARENT = """
import pathlib, sys, time
from tandem_client.cli.services import Service
folder = pathlib.Path(sys.argv[1])
service = Service("sleeper", "sleeper", [], folder)
while service.addresses() is None:
    service.check()
    time.sleep(0.01)
print(service.addresses()["pid"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder whose modules children can run; they get pythons that see it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def wait_until(condition, limit_s=20.0):
    """Poll a condition until it holds; returns what it returned."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, "the condition did not come true"
        time.sleep(0.01)
    return found


class TestService:
    def test_ready_file_gives_the_address(self, modules, tmp_path):
        """
        A service's address is what its ready file says, and stop ends it.
        """
        service = Service("sleeper", "sleeper", [], tmp_path)
        try:
            found = wait_until(service.addresses)
            service.check()
        finally:
            service.stop(5.0)

        assert "a:1" == found["address"]
        assert not psutil.pid_exists(found["pid"])

    def test_own_reason_is_passed_on(self, modules, tmp_path):
        """
        A service that ends tells why: the last line of the form REASON: sentence, and its code.
        """
        text = "import sys; print('noise'); sys.stderr.write('INVALID_MODEL: no such folder\\nbye\\n'); sys.exit(2)"
        (modules / "failing.py").write_text(text)
        service = Service("executor", "failing", [], tmp_path)
        service.process.wait(20)
        with pytest.raises(ServiceFailed) as failed:
            service.check()

        assert (
            "the executor ended (exit code 2): INVALID_MODEL: no such folder" == failed.value.line
        )
        assert ExitCode.USAGE == failed.value.code

    def test_deaf_service_is_killed_with_its_group(self, modules, tmp_path):
        """
        A service that ignores SIGTERM, and its own children, are killed after the grace time.
        """
        (modules / "deaf.py").write_text(
            "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "subprocess.run([sys.executable, '-m', 'sleeper', sys.argv[-1]])\n"
        )
        service = Service("deaf", "deaf", [], tmp_path)
        grandchild = wait_until(service.addresses)["pid"]
        service.stop(0.05)

        assert -signal.SIGKILL == service.process.returncode
        wait_until(lambda: not psutil.pid_exists(grandchild))

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
    def test_nothing_outlives_a_killed_parent(self, modules, tmp_path):
        """
        When the parent is killed with SIGKILL the service dies too.
        """
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        parent.stdout.close()

        wait_until(
            lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"
        )
