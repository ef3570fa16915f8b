import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.config.settings import SchedulerSettings
from scheduler_svc.service.service import SAME_SIGNAL_S, scheduler_id
from tests.ports import free_port
from tests.scheduler_svc.service.fakes.arithmetic_runner import ArithmeticRunner
from tests.scheduler_svc.service.fakes.grpc_executor import GrpcExecutor
from tests.scheduler_svc.service.service_bench import FakeFrontend
from tests.waiting import wait_until

DEADLINE_S = 600.0
FREE = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--metrics-listen", "")
NOBODY = ("--executor", "127.0.0.1:9")


MAIN = "import sys; from scheduler_svc.__main__ import main; sys.exit(main())"
BREAKING = """
import os, threading, time
from scheduler_svc.process import tick_watch
from scheduler_svc.service import service
from scheduler_svc.service.loop import CoreLoop
tick_watch.LAST_WORD_S = 600.0
turn, file = CoreLoop._turn, os.environ["TMPDIR"] + "/../break"
def broken(self):
    if os.path.exists(file):
        {how}
    return turn(self)
CoreLoop._turn = broken
is_stopping, stop, tell = threading.Event(), service.stop_frontends, service.Service._on_thread_broken
service.stop_frontends = lambda frontends: (is_stopping.set(), stop(frontends))
service.Service._on_thread_broken = lambda *about: is_stopping.wait(1.0) or tell(*about)
"""
"""Program of a core thread that breaks once a file exists, and reports it late."""


LOADING = """
import sys
from scheduler_svc.process import supervisor
supervisor.STOP_DEADLINE_S = 2000.0
popen = supervisor.subprocess.Popen
supervisor.subprocess.Popen = lambda command, **kw: popen([sys.executable, "-c", "import time; time.sleep(2000)"], **kw)
"""
"""Program of a frontend that loads for longer than the test lasts."""


class Process:
    """A scheduler service of its own."""

    def __init__(self, folder: Path, *flags: str, planted: str = "") -> None:
        self.ready_file = folder / "ready.json"
        self.folder = folder / "t"
        self.folder.mkdir()
        self._log = (folder / "log").open("w+")
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", f"{planted}\n{MAIN}", *NOBODY, *FREE,
                "--ready-file", str(self.ready_file), *flags,
            ],
            stderr=self._log,
            env=environ | {"TMPDIR": str(self.folder)},
        )  # fmt: skip

    def wait_ready(self) -> dict:
        wait_until(
            lambda: self.ready_file.exists() or self.process.poll() is not None,
            "a ready file",
            DEADLINE_S,
        )
        assert self.process.poll() is None, self.log()
        return json.loads(self.ready_file.read_text())

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*flags: str, planted: str = "") -> Process:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Process(folder, *flags, planted=planted))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def busy_executor(monkeypatch) -> Iterator[GrpcExecutor]:
    """Yield an executor with a first step that takes as long as the test."""
    is_over = threading.Event()
    execute = ArithmeticRunner.execute
    monkeypatch.setattr(
        ArithmeticRunner, "execute", lambda self, step: (is_over.wait(), execute(self, step))[1]
    )
    executor = GrpcExecutor(f"127.0.0.1:{free_port()}").start()
    yield executor
    is_over.set()
    executor.kill()


def _run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "scheduler_svc", *NOBODY, *FREE, *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def _read_until(frontend: FakeFrontend, condition: Callable[[], object], what: str) -> None:
    wait_until(lambda: not frontend.read() and condition(), what, DEADLINE_S)


class TestMistakesAtStart:
    def test_wrong_configuration_is_one_line_and_exit_code_2(self):
        """A bad limit is named in one line, without a trace, and nothing is started."""
        result = _run("--block-size", "0")
        assert 2 == result.returncode
        assert result.stderr == "INVALID_CONFIG: block_size must be greater than 0\n"

    @pytest.mark.slow
    @pytest.mark.parametrize("flag", ["--listen", "--admin-listen", "--metrics-listen"])
    def test_port_in_use_is_one_line_and_exit_code_1(self, flag):
        """An address that another process listens on is refused before anything is started."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = "{}:{}".format(*taken.getsockname())
            result = _run(flag, address, "--log-level", "error")
        assert 1 == result.returncode
        name = flag.removeprefix("--").replace("-", "_")
        expected = (
            f"ADDRESS_IN_USE: {name} {address} is in use by another process: "
            f"stop it or choose another {flag}\n"
        )
        assert expected == result.stderr


class TestImports:
    def test_no_process_of_the_service_reaches_torch(self):
        """Neither core nor frontend imports torch, triton, the executor or a client."""
        code = (
            "import sys, scheduler_svc.service.service, scheduler_svc.frontend.run\n"
            "names = {name.split('.')[0] for name in sys.modules}\n"
            "print(sorted(names & {'torch', 'triton', 'executor_svc', 'kernels', 'transformers'}))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == "[]"


@pytest.mark.slow
class TestLife:
    def test_starts_without_executor_and_stops_on_sigterm(self, start):
        """The service listens without an executor, says it is not ready, and stops with 0."""
        service = start("--frontends", "2")
        addresses = service.wait_ready()
        assert service.process.pid == addresses["pid"]
        assert 2 == len(service.children())
        with grpc.insecure_channel(addresses["address"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="tandem.ready")
            answer = health.Check(request, timeout=DEADLINE_S, wait_for_ready=True)
        assert health_pb2.HealthCheckResponse.NOT_SERVING == answer.status
        for process in (service.process.pid, *(child.pid for child in service.children())):
            assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
        children = service.children()
        service.process.send_signal(signal.SIGTERM)
        assert 0 == service.wait(), service.log()
        assert not any(child.is_running() for child in children)
        assert [] == list(service.folder.iterdir())

    def test_frontend_that_is_still_loading_holds_up_no_stop(self, start):
        """A signal before the frontend has said hello ends both at once, in good order."""
        service = start(planted=LOADING)
        wait_until(lambda: "frontend_started" in service.log(), "a frontend", DEADLINE_S)
        children = service.children()
        service.process.send_signal(signal.SIGTERM)
        assert 0 == service.wait(), service.log()
        assert not any(child.is_running() for child in children)

    def test_second_service_on_the_same_port_is_refused(self, start):
        """A port that frontends share among themselves is not shared with another service."""
        service = start("--frontends", "2")
        address = service.wait_ready()["address"]
        second = start("--frontends", "2", "--listen", address)
        assert 1 == second.wait()
        assert "ADDRESS_IN_USE" in second.log()

    def test_dead_frontend_ends_the_service(self, start):
        """A dead frontend ends the service with a failure and all its processes."""
        service = start("--frontends", "2")
        service.wait_ready()
        children = service.children()
        children[0].kill()
        assert 1 == service.wait()
        assert "frontend_exited" in service.log()
        assert not any(child.is_running() for child in children)

    @pytest.mark.parametrize(
        ("how", "said"),
        [
            ("raise RuntimeError('planted')", "planted"),
            ("service.EXIT_AFTER_S = 1.0; time.sleep(1000)", "loop_stuck"),
        ],
        ids=["dead", "stuck"],
    )
    def test_core_thread_that_breaks_ends_the_service(self, start, how, said):
        """
        A core thread that dies or hangs ends the process with 1 and its frontends too, and the
        reason is logged.
        """
        service = start("--frontends", "2", planted=BREAKING.format(how=how))
        service.wait_ready()
        children = service.children()
        (service.folder.parent / "break").touch()
        assert 1 == service.wait(), service.log()
        assert said in service.log()
        wait_until(
            lambda: not any(child.is_running() for child in children), "their ends", DEADLINE_S
        )
        assert [] == list(service.folder.iterdir())

    def test_link_thread_that_breaks_ends_the_service(self, start):
        """
        A link thread that breaks ends the service with 1, since it could never be ready again, and
        the reason is logged.
        """
        planted = (
            "from scheduler_svc.executor_client.connection import ExecutorConnector\n"
            "def connect(*args, **kwargs): raise RuntimeError('planted')\n"
            "ExecutorConnector.connect = connect"
        )
        service = start(planted=planted)
        assert 1 == service.wait(), service.log()
        assert "thread_broken" in service.log()
        assert "planted" in service.log()

    def test_frontends_do_not_outlive_a_killed_core(self, start):
        """Frontends end when their core process is killed."""
        service = start()
        service.wait_ready()
        children = service.children()
        service.process.kill()
        wait_until(
            lambda: not any(child.is_running() for child in children), "their ends", DEADLINE_S
        )

    def test_second_signal_does_not_wait_for_requests(self, start, busy_executor):
        """A second signal ends the service at once; the first lets requests finish."""
        patient = ("--drain-grace-s", "3600", "--lost-after-s", "3600", "--lease-ms", "60000")
        service = start("--executor", busy_executor.address, *patient)
        service.wait_ready()
        (socket_path,) = service.folder.glob("tandem-*/ipc/core.sock")
        frontend = FakeFrontend(socket_path, 1)
        told = frontend.availabilities
        _read_until(frontend, lambda: told and told[-1].executor_attached, "an executor")
        frontend.submit(1, [5], 9)
        _read_until(frontend, lambda: frontend.accepted, "the request to be accepted")
        service.process.send_signal(signal.SIGTERM)
        _read_until(frontend, lambda: told[-1].draining, "news of the stop")
        time.sleep(2 * SAME_SIGNAL_S)  # closer together they count as one
        assert service.process.poll() is None, service.log()
        children = service.children()
        service.process.send_signal(signal.SIGTERM)
        assert 128 + signal.SIGTERM == service.wait()
        wait_until(
            lambda: not any(child.is_running() for child in children), "their ends", DEADLINE_S
        )
        frontend.close()


class TestIdentity:
    def test_is_the_same_scheduler_at_every_start(self):
        """The name follows from host and public address; every start is another incarnation."""
        settings = SchedulerSettings(listen="127.0.0.1:50051")
        first, second = scheduler_id(settings), scheduler_id(settings)
        assert first.name == second.name == f"{socket.gethostname()}-127.0.0.1:50051"
        assert first.incarnation != second.incarnation

    def test_other_addresses_are_other_schedulers(self):
        """Two schedulers of one host have different names, also if both take any free port."""
        ports = ("127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:0", "127.0.0.1:0")
        names = [scheduler_id(SchedulerSettings(listen=port)).name for port in ports]
        assert 4 == len(set(names))

    def test_name_may_be_given(self):
        """A name that was set is used, whatever the address."""
        assert "blue" == scheduler_id(SchedulerSettings(scheduler_name="blue")).name
