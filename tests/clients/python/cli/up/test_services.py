"""Child processes of the command line."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tandem_client.cli.local_server.service import Service, ServiceFailed
from tandem_client.cli.local_server.services import (
    RESTARTS,
    RESTARTS_WITHIN_S,
    LocalServer,
    RunningServer,
    local_server,
)
from tandem_client.cli.shared.failures import ExitCode
from tests.waiting import wait_until

SLEEPER = "import json,os,pathlib,sys,time; p = pathlib.Path(sys.argv[-1]); t = p.with_suffix('.tmp'); t.write_text(json.dumps({'address': 'a:1', 'pid': os.getpid()})); t.rename(p); time.sleep(600)"
PARENT = """
import pathlib, sys, time
from tandem_client.cli.local_server.service import Service
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
    """Return a folder with modules that children can run; they get pythons that see it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def is_gone(pid):
    """Return whether a process has ended, even if it was not reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class TestService:
    def test_ready_file_gives_the_address(self, modules, tmp_path):
        """
        A service's address is what its ready file says, and stop ends it.
        """
        service = Service("sleeper", "sleeper", [], tmp_path)
        try:
            found = wait_until(service.addresses, "a ready file")
            service.check()
        finally:
            service.ask_to_end()
            service.wait_or_kill(5.0)

        assert "a:1" == found["address"]
        assert not psutil.pid_exists(found["pid"])

    def test_own_reason_is_passed_on(self, modules, tmp_path):
        """
        A service that ends tells why: the last line of the form REASON: sentence, and its code.
        """
        text = "import sys; print('noise'); sys.stderr.write('INVALID_MODEL: no such folder\\nbye\\n'); sys.exit(2)"
        (modules / "failing.py").write_text(text)
        service = Service("executor", "failing", [], tmp_path)
        service.process.wait(60)
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
        grandchild = wait_until(service.addresses, "a ready file")["pid"]
        service.ask_to_end()
        service.wait_or_kill(0.05)

        assert -signal.SIGKILL == service.process.returncode
        wait_until(lambda: is_gone(grandchild), "its end")

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
    def test_nothing_outlives_a_killed_parent(self, modules, tmp_path):
        """
        The service dies too when its parent is killed with SIGKILL.
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

        wait_until(lambda: is_gone(child), "its end")

    def test_logged_error_is_the_last_word(self, modules, tmp_path):
        """
        Without a line of the form REASON: sentence, the last logged error is passed on, not a farewell.
        """
        text = "import sys; print('t [error    ] frontend_exited exit_code=-9'); print('t [info     ] stopped'); sys.exit(1)"
        (modules / "failing.py").write_text(text)
        service = Service("scheduler", "failing", [], tmp_path)
        service.process.wait(60)
        with pytest.raises(ServiceFailed) as failed:
            service.check()

        assert (
            "the scheduler ended (exit code 1): t [error    ] frontend_exited exit_code=-9"
            == failed.value.line
        )

    def test_signal_is_named(self, modules, tmp_path):
        """
        A service that a signal ended left no word: the signal is named instead.
        """
        service = Service("executor", "sleeper", [], tmp_path)
        service.process.kill()
        service.process.wait(60)
        with pytest.raises(ServiceFailed) as failed:
            service.check()

        assert "the executor was killed by SIGKILL (out of memory?)" == failed.value.line


class TestKeepUp:
    @pytest.fixture
    def server(self, modules, tmp_path):
        """An executor and a scheduler that both sleep."""
        names = ("executor", "scheduler")
        services = [Service(name, "sleeper", [], tmp_path) for name in names]
        yield RunningServer(tmp_path, services)
        for service in services:
            service.kill()

    def kill(self, service):
        service.process.kill()
        service.process.wait(60)

    def test_all_well_does_nothing(self, server):
        """
        While both run, nothing is done.
        """
        assert None is server.keep_up(0.0)

    def test_dead_executor_runs_again(self, server):
        """
        An executor that died runs again, as a new process that writes its ready file anew.
        """
        (executor, _) = server.services
        before = wait_until(executor.addresses, "a ready file")["pid"]
        self.kill(executor)
        said = server.keep_up(0.0)

        assert "the executor was killed by SIGKILL (out of memory?); starting it again" == said
        assert before != wait_until(executor.addresses, "a ready file")["pid"]
        assert None is server.keep_up(0.0)

    def test_executor_that_keeps_dying_is_left(self, server):
        """
        One restart more than allowed within the time is refused, and allowed once time has passed.
        """
        (executor, _) = server.services
        for _ in range(RESTARTS):
            self.kill(executor)
            server.keep_up(0.0)
        self.kill(executor)
        with pytest.raises(ServiceFailed, match="started again 3 times in 120 s before"):
            server.keep_up(RESTARTS_WITHIN_S - 1.0)

        assert None is not server.keep_up(RESTARTS_WITHIN_S)

    def test_wrong_configuration_is_not_tried_again(self, server, modules, tmp_path):
        """
        An executor that ended over its configuration or model is not started again.
        """
        (modules / "failing.py").write_text("import sys; sys.exit(2)")
        failing = Service("executor", "failing", [], tmp_path)
        failing.process.wait(60)
        with pytest.raises(ServiceFailed) as failed:
            RunningServer(tmp_path, [failing, server.services[1]]).keep_up(0.0)

        assert ExitCode.USAGE == failed.value.code

    def test_dead_gateway_runs_again_at_its_address(self, server, tmp_path):
        """
        A gateway that died runs again, with the port that it got at first, and its restarts are
        counted apart from the executor's.
        """
        gateway = Service("gateway", "sleeper", ["--listen=a:0"], tmp_path)
        server.services.append(gateway)
        gateway.replace("--listen=a:0", "--listen=a:1")
        executor = server.services[0]
        for _ in range(RESTARTS):
            for service in (executor, gateway):
                self.kill(service)
                said = server.keep_up(0.0)
                assert f"the {service.name} was killed by SIGKILL (out of memory?); " in said
        assert None is server.keep_up(0.0)
        pid = wait_until(gateway.addresses, "a ready file")["pid"]
        assert "--listen=a:1" in psutil.Process(pid).cmdline()
        self.kill(gateway)
        with pytest.raises(ServiceFailed, match=r"the gateway was killed .* again 3 times"):
            server.keep_up(0.0)

    def test_one_of_several_executors_runs_again(self, server, tmp_path):
        """
        Each of several executors that died runs again, is called by its number, and has a log of
        its own; its restarts are counted apart from the others'.
        """
        several = [Service("executor", "sleeper", [], tmp_path, number) for number in (1, 2)]
        server.services[0].kill()
        server.services[:1] = several
        for _ in range(RESTARTS):
            for service in several:
                self.kill(service)
            said = [server.keep_up(0.0), server.keep_up(0.0)]
            assert [
                f"executor {number} was killed by SIGKILL (out of memory?); starting it again"
                for number in (1, 2)
            ] == said
        assert None is server.keep_up(0.0)
        assert ["executor-1.log", "executor-2.log"] == [one.log.name for one in several]

    def test_dead_scheduler_is_not_started_again(self, server):
        """
        The scheduler owns the requests: its death is an error.
        """
        self.kill(server.services[1])
        with pytest.raises(ServiceFailed, match="the scheduler was killed by SIGKILL"):
            server.keep_up(0.0)


class TestLogs:
    @pytest.fixture
    def leave(self, monkeypatch, tmp_path):
        """
        Leave a server with logs and without services by an error; gives what lies in the folder of
        temporary files.
        """
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        def start(server, *_):
            (server.log_folder / "executor.log").write_text("out of memory")

        monkeypatch.setattr("tandem_client.cli.local_server.services._start", start)

        def leave(error, log_folder=None):
            plan = LocalServer(executor_arguments=[], scheduler_arguments=[], log_folder=log_folder)
            with pytest.raises(type(error)) as left, local_server(plan, print):
                raise error
            return left.value, list(tmp_path.iterdir())

        return leave

    def test_logs_outlive_a_failure(self, leave):
        """
        Logs of a service that has failed are kept, and the error says in which folder.
        """
        failure, (kept,) = leave(ServiceFailed("the executor ended", ExitCode.FAILED))
        assert f"the executor ended; logs: {kept}" == failure.line
        assert "out of memory" == (Path(kept) / "executor.log").read_text()

    def test_failure_is_told_where_logs_cannot_be_kept(self, leave, monkeypatch):
        """
        A full disk keeps no copies, and why the service failed is told all the same.
        """

        def copy(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(shutil, "copy", copy)
        failure, _ = leave(ServiceFailed("the executor ended", ExitCode.FAILED))
        assert failure.line.startswith(
            "the executor ended; its logs could not be kept: No space left on device"
        )

    def test_orderly_stop_leaves_nothing(self, leave):
        """
        After Ctrl-C the logs are gone with the folder that the command made.
        """
        assert [] == leave(KeyboardInterrupt())[1]

    def test_full_disk_is_told_before_anything_starts(self, leave, tmp_path, monkeypatch):
        """
        Without room for logs nothing starts: what went wrong could not be told.
        """
        full = SimpleNamespace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        plan = LocalServer(executor_arguments=[], scheduler_arguments=[], log_folder=tmp_path / "l")
        monkeypatch.setattr(
            "tandem_client.cli.local_server.services.temporary_folder",
            lambda *_, **__: tmp_path / "t",
        )
        with pytest.raises(ServiceFailed) as failed, local_server(plan, print):
            pytest.fail("something was started")

        assert (
            f"no room for logs in {tmp_path / 'l'}: choose another --log-dir" == failed.value.line
        )
        assert ExitCode.USAGE == failed.value.code

    def test_chosen_folder_is_left_alone(self, leave, tmp_path):
        """
        Logs in a folder of the user's choice stay there after a failure.
        """
        chosen = tmp_path / "chosen"
        failure, left = leave(ServiceFailed("it ended"), chosen)
        assert ("it ended", [chosen]) == (failure.line, left)
