"""Real services as OS processes on free ports, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tandem.errors import TandemError
from tandem_client import NO_RETRY, AdminClient, Client, RequestSummary, Stats, is_serving
from tests.e2e.step_gate import StepGate
from tests.ports import free_port
from tests.threads import NUM_THREADS
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = ROOT / "deploy/models/tandem-py"
STEPS_AT_A_TIME = 4
PATIENCE = ("--lost-after-s=600", "--recovery-timeout-s=600")
"""
Timeouts longer than any test, so that a test may stop, hold or replace an executor at its leisure.
"""


def environment() -> dict[str, str]:
    """
    Return the environment without TANDEM_ variables, with one thread per operation and with a proxy
    that does not exist: processes of one machine must find each other without it.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    return kept | {"OMP_NUM_THREADS": "1", "http_proxy": "http://127.0.0.1:9"}


def num_requests(stats: Stats) -> int:
    """Return the number of requests that run or wait."""
    return stats.running_requests + stats.waiting_requests


def wait_idle(ask: Callable[[], Stats]) -> Stats:
    """
    Wait until no request is in the system, no block in use and no step in flight; return the
    counters of that time.
    """

    def idle() -> Stats | None:
        stats = ask()
        busy = num_requests(stats) + stats.used_blocks + stats.steps_in_flight
        return None if busy else stats

    stats = wait_until(idle, "no request, block and step")
    assert stats is not None
    return stats


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) during the block, which begins when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _is_stopped(pid), f"process {pid} to stop")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # the block may have killed it
            os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
        return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
    return False


class Process:
    """One service, its log, and the processes that it started."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        folder: Path,
        name: str,
        env: dict[str, str] | None = None,
    ) -> None:
        self.log = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.json"
        self._ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, *arguments, f"--ready-file={self._ready_file}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment() | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def addresses(self) -> dict[str, Any]:
        """Wait for the ready file and return what it says."""
        wait_until(lambda: self._ready_file.exists() or self._has_ended(), "ready file")
        assert not self._has_ended(), self.log.read_text()
        return json.loads(self._ready_file.read_text())

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it started."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill -9 the process itself, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill the process with everything that it started."""
        family = self.family()
        self.kill()
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # they may end with their parent
                member.kill()
        psutil.wait_procs(family, timeout=10)

    def _has_ended(self) -> bool:
        return self.process.poll() is not None


class Cluster:
    """
    A scheduler and at most one executor, which may stop and start again on the same ports.

    Attributes:
        address: The public address.
        admin_address: The operators' address.
        executor_address: Address of the step link.
        gate: Gate that holds every executor's steps when it is closed; open at first.
        host_limit: File that says, while it exists, how many bytes of the host's memory are free
            for the next suspension.
    """

    def __init__(self, model: Path, folder: Path, limits: list[str], scheduler: list[str]) -> None:
        self._model = model
        self._folder = folder
        self._limits = limits
        self._scheduler_options = scheduler
        self.executor_address = f"127.0.0.1:{free_port()}"
        self._num_started = 0
        self._gate_file = folder / "step-gate"
        self.gate = StepGate(self._gate_file)
        self.host_limit = folder / "host-limit"
        self.executor: Process | None = None
        self.address = f"127.0.0.1:{free_port()}"
        self.start_scheduler()

    def start_scheduler(self, *options: str) -> None:
        """
        Start a scheduler on the cluster's public port; the ports for operators and metrics are new.
        """
        ports = [f"--{name}=127.0.0.1:0" for name in ("admin-listen", "metrics-listen")]
        addresses = [f"--listen={self.address}", f"--executor={self.executor_address}", *ports]
        arguments = [*addresses, *PATIENCE, *self._scheduler_options, *options]
        self.scheduler = Process("scheduler_svc", arguments, self._folder, self._name("scheduler"))
        self.admin_address: str = self.scheduler.addresses()["admin_address"]

    def start_executor(self, *extra: str, ready: bool = True) -> None:
        """
        Start an executor on the cluster's port, with `extra` options; with `ready`, wait until
        requests are served.
        """
        arguments = [f"--model={self._model}", f"--listen={self.executor_address}"]
        options = ["--dtype=float32", f"--num-threads={NUM_THREADS}", *self._limits]
        self.executor = Process(
            "tests.e2e.gated_executor",
            [*arguments, *options, *extra],
            self._folder,
            self._name("executor"),
            {"STEP_GATE": str(self._gate_file), "HOST_LIMIT": str(self.host_limit)},
        )
        self.executor.addresses()
        if ready:
            wait_until(self.is_ready, "tandem.ready")

    def start_fixed_step_executor(self, step_ms: float) -> None:
        """
        Start an executor without a model on the cluster's port, whose every step takes this long
        whatever its rows, and wait until requests are served.
        """
        arguments = [f"--listen={self.executor_address}", f"--step-ms={step_ms}"]
        name = self._name("executor")
        self.executor = Process("tandem_bench.fixed_step", arguments, self._folder, name)
        self.executor.addresses()
        wait_until(self.is_ready, "tandem.ready")

    def is_ready(self) -> bool:
        """Return if the public port says that requests are served."""
        try:
            return is_serving(self.address, "tandem.ready", timeout_s=10)
        except TandemError:
            return False

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Stop the executor process during the block: it neither computes nor receives messages."""
        assert self.executor is not None
        return paused(self.executor.process.pid)

    @contextlib.contextmanager
    def held(self, num_steps: int = 0) -> Iterator[None]:
        """
        Let the executor begin only so many more steps during the block, and at most one that is
        just beginning; it goes on with everything else that it is asked.
        """
        self.gate.allow(num_steps)
        try:
            yield
        finally:
            self.gate.open()

    def step_until(self, condition: Callable[[], object], what: str) -> None:
        """
        Let a few steps at a time begin, while the executor is held, until the condition is true.
        """

        def is_so() -> bool:
            if not (found := bool(condition())):
                self.gate.allow(STEPS_AT_A_TIME)
            return found

        wait_until(is_so, what)

    def client(self) -> Client:
        """Return a client that retries nothing, so that it shows every failure."""
        return Client(self.address, retry=NO_RETRY)

    def admin(self) -> AdminClient:
        """Return a client of the operators' port."""
        return AdminClient(self.admin_address, retry=NO_RETRY)

    def stats(self) -> Stats:
        """Return the counters of the core."""
        with self.admin() as admin:
            return admin.stats()

    def num_requests(self) -> int:
        """Return the number of requests that run or wait now."""
        return num_requests(self.stats())

    def requests(self, **choice: Any) -> dict[str, RequestSummary]:
        """
        Return the requests in the system by id; `choice` filters as in `AdminClient.list_requests`.
        """
        with self.admin() as admin:
            return {one.request_id: one for one in admin.list_requests(**choice).requests}

    def logs(self) -> str:
        """Return the end of every service's log, for the report of a failing test."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in logs)

    def close(self) -> None:
        """Kill all services."""
        self.scheduler.end()
        if self.executor is not None:
            self.executor.end()

    def _name(self, service: str) -> str:
        self._num_started += 1
        return f"{self._num_started}-{service}"
