"""Services that run, die and come back, with a proxy between scheduler and executors if asked."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem.errors import TandemError
from tandem_client import NO_RETRY, AdminClient, is_serving
from tests.e2e.cluster import BUNDLED_MODEL, PATIENCE, Process, wait_idle
from tests.faults.processes.executors import Executor, Zygote, clock_environment, working
from tests.faults.proxies.controlled import Controlled
from tests.ports import free_port
from tests.waiting import wait_until

PROXIES = {
    "bytes": "tests.faults.proxies.tcp_proxy",
    "messages": "tests.faults.proxies.message_proxy",
}
EXECUTOR_LIMITS = (
    "--max-num-blocks=3500",
    "--max-batch-size=96",
    "--max-model-len=512",
    "--max-total-tokens=2048",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RigSettings:
    """
    Settings of a rig.

    Attributes:
        link: Connection to executors: "direct", or through a proxy of "bytes" or "messages".
        has_client_proxy: True if a proxy of bytes is between clients and scheduler.
        num_executors: Number of places where executors run; the scheduler knows all of them.
        num_together: Number of them that serve together, from the first; the others stand by.
        scheduler: More options of the scheduler.
        executor: More options of the executors.
        model: Model that they serve.
    """

    link: str = "direct"
    has_client_proxy: bool = False
    num_executors: int = 1
    num_together: int = 1
    scheduler: tuple[str, ...] = ()
    executor: tuple[str, ...] = ()
    model: Path = BUNDLED_MODEL


class Rig:
    """
    One scheduler and its executors. A service that ends is started again, until `close`.

    Attributes:
        address: Address that clients connect to.
        listen: The public address, the same for every scheduler.
        executors: The places of executors.
        proxies: Proxies, one before each executor, if the settings ask for them.
        client_proxy: Proxy before the scheduler, if the settings ask for one.
        schedulers: Every scheduler so far, the newest last.
    """

    def __init__(self, folder: Path, settings: RigSettings, zygote: Zygote) -> None:
        """
        Args:
            folder: Folder for logs and everything else that is written.
            settings: Services to run.
            zygote: Process that starts the executors.
        """
        self.folder = folder
        self.settings = settings
        self.listen = f"127.0.0.1:{free_port()}"
        self.admin_address = f"127.0.0.1:{free_port()}"
        self.zygote = zygote
        self.set_clock(0.0)
        options = [*EXECUTOR_LIMITS, *settings.executor]
        self.executors = [
            Executor(self.zygote, folder, f"executor-{letter}", settings.model, options)
            for letter in "abcdefgh"[: settings.num_executors]
        ]
        self.proxies = self._start_proxies()
        self.client_proxy: Controlled | None = None
        self.address = self.listen
        if settings.has_client_proxy:
            log = folder / "proxy-clients.err"
            self.client_proxy = Controlled(PROXIES["bytes"], self.listen, log=log)
            self.address = f"127.0.0.1:{self.client_proxy.hello['port']}"
        self.schedulers: list[Process] = []
        self._is_closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        """Start all services and wait until requests are served."""
        for executor in self.executors:
            executor.start()
        self._start_scheduler()
        self._keeper.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the public port says that requests are served."""
        try:
            wait_until(self.is_ready, "tandem.ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_ends()}") from error

    def wait_successor(self, ended: Process) -> None:
        """
        Wait until another scheduler serves; clients may still read messages of the one that ended.
        """
        wait_until(lambda: self.scheduler is not ended, "another scheduler")
        self.wait_ready()

    def is_ready(self) -> bool:
        """Return if the public port says that requests are served."""
        try:
            return is_serving(self.listen, "tandem.ready", timeout_s=5)
        except TandemError:
            return False

    @property
    def scheduler(self) -> Process:
        """The newest scheduler."""
        return self.schedulers[-1]

    def executor_addresses(self) -> list[str]:
        """Return the address at which the scheduler reaches each executor."""
        ports = [proxy.hello["port"] for proxy in self.proxies] or [
            executor.port for executor in self.executors
        ]
        return [f"127.0.0.1:{port}" for port in ports]

    def working_executor(self) -> Executor:
        """Return the executor that is the next to compute a step."""
        return working(self.executors)

    def frontend(self) -> psutil.Process:
        """Return the frontend's process of the newest scheduler."""
        return psutil.Process(self.scheduler.process.pid).children()[0]

    def stats(self) -> Any:
        """Return the counters of the operators' port, as soon as it answers."""

        def ask() -> Any:
            try:
                with AdminClient(self.admin_address, retry=NO_RETRY) as admin:
                    return admin.stats()
            except TandemError:
                return None

        return wait_until(ask, "the operators' port")

    def wait_idle(self) -> Any:
        """Wait until the services hold nothing and do nothing; return the counters of that time."""
        return wait_idle(self.stats)

    def set_clock(self, offset_s: float) -> None:
        """Make the wall clock of every service jump."""
        with (self.zygote.folder / "clock").open("r+b") as file:
            file.write(struct.pack("<d", offset_s))

    def services(self) -> dict[str, psutil.Process]:
        """Return the living processes by role."""
        scheduler = psutil.Process(self.scheduler.process.pid)
        found = {"scheduler": scheduler, "frontend": scheduler.children()[0]}
        for executor in self.executors:
            if (process := executor.process()) is not None:
                found[executor.name] = process
        return found

    def logs(self) -> list[Path]:
        """Return the logs of all services so far, except those that go to a device."""
        return sorted(log for log in self.folder.glob("*.log") if log.is_file())

    def log_ends(self) -> str:
        """Return the last lines of each log, for the report of a failing test."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in self.logs())

    def close(self) -> None:
        """Kill all services."""
        self._is_closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for scheduler in self.schedulers:
            scheduler.end()
        for executor in self.executors:
            executor.end()
        for proxy in (*self.proxies, *filter(None, [self.client_proxy])):
            proxy.close()

    def _start_proxies(self) -> list[Controlled]:
        module = PROXIES.get(self.settings.link)
        if module is None:
            return []
        return [
            Controlled(
                module, f"127.0.0.1:{executor.port}", log=self.folder / f"proxy-{executor.name}.err"
            )
            for executor in self.executors
        ]

    def _start_scheduler(self) -> None:
        addresses, num_together = self.executor_addresses(), self.settings.num_together
        standby = ",".join(addresses[num_together:])
        arguments = [
            f"--listen={self.listen}",
            f"--admin-listen={self.admin_address}",
            "--metrics-listen=127.0.0.1:0",
            f"--executor={','.join(addresses[:num_together])}",
            *([f"--standby={standby}"] if standby else ()),
            "--log-format=json",
            *(*PATIENCE, "--stall-deadline-s=600"),  # rigs may set shorter ones
            *self.settings.scheduler,
        ]
        name = f"scheduler-{len(self.schedulers) + 1}"
        env = clock_environment(self.zygote.folder)
        self.schedulers.append(Process("scheduler_svc", arguments, self.folder, name, env))

    def _keep(self) -> None:
        """
        Start every service that ended again, as an orchestrator would, but without its back-off.
        """
        while not self._is_closing.wait(0.02):
            for executor in self.executors:
                executor.look()
            if self.scheduler.process.poll() is not None:
                time.sleep(0.1)
                self._start_scheduler()
