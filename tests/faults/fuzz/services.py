"""Services under random input: a scheduler with the bundled model, a gateway, a free executor."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import psutil

from tandem_client import is_serving
from tests.e2e.cluster import BUNDLED_MODEL, Process
from tests.ports import free_port
from tests.waiting import wait_until

MIB = 1 << 20
QUIET = ("--log-level=error",)
BUG_SIGNS = ("Traceback", "call_broken", "Check failed", "Fatal Python error", "core dumped")
"""Texts of stack traces and of processes that end, of Python and of gRPC's core."""
MAX_LOG_CHARS = 6_000


class Services:
    """
    A scheduler with its executor, an executor that no scheduler has, and a gateway.

    Attributes:
        addresses: Address of each port: public, admin, metrics, executor (of the one that is
            free), http.
    """

    def __init__(self, folder: Path) -> None:
        with contextlib.ExitStack() as stack:
            model = [f"--model={BUNDLED_MODEL}", "--dtype=float32", "--max-num-blocks=512"]
            own = self._start(stack, folder, "executor", "executor_svc", *model)
            free = self._start(stack, folder, "free", "tandem_bench.fixed_step", "--step-ms=1")
            scheduler = self._start(
                stack,
                folder,
                "scheduler",
                "scheduler_svc",
                f"--executor={own.addresses()['address']}",
                "--admin-listen=127.0.0.1:0",
                "--metrics-listen=127.0.0.1:0",
            )
            public: str = scheduler.addresses()["address"]
            wait_until(lambda: is_serving(public, "tandem.ready", timeout_s=10), "tandem.ready")
            http = f"127.0.0.1:{free_port()}"
            gateway = Process(
                "tandem_openai_gateway",
                [f"--scheduler={public}", f"--listen={http}", *QUIET],
                folder,
                "gateway",
            )
            stack.callback(gateway.end)
            gateway.addresses()
            self.addresses: Mapping[str, str] = {
                "public": public,
                "admin": scheduler.addresses()["admin_address"],
                "metrics": scheduler.addresses()["metrics_address"],
                "executor": free.addresses()["address"],
                "http": http,
            }
            self._processes = {
                "scheduler": scheduler,
                "executor": free,
                "gateway": gateway,
                "own executor": own,
            }
            self._stack = stack.pop_all()

    @staticmethod
    def _start(
        stack: contextlib.ExitStack, folder: Path, name: str, module: str, *options: str
    ) -> Process:
        process = Process(module, ["--listen=127.0.0.1:0", *QUIET, *options], folder, name)
        stack.callback(process.end)
        process.addresses()
        return process

    def processes(self) -> dict[str, psutil.Process]:
        """Return each process by its service and its number there."""
        return {
            f"{name} {at}": one
            for name, process in self._processes.items()
            for at, one in enumerate(process.family())
        }

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory of each service with its children, MiB."""
        return {
            name: sum(_rss(one) for one in process.family()) / MIB
            for name, process in self._processes.items()
        }

    def are_alive(self) -> bool:
        """Return True if every service still runs, and requests are served."""
        alive = all(psutil.pid_exists(one.process.pid) for one in self._processes.values())
        return alive and is_serving(self.addresses["public"], "tandem.ready", timeout_s=30)

    def find_errors(self) -> list[str]:
        """
        Return the first sign of a bug in each log that has one. Other lines are no bug: the
        libraries tell there of each peer that breaks their protocols, at any level.
        """
        found = []
        for name, process in self._processes.items():
            log = process.log.read_text("utf-8", "replace")
            at = min((log.find(sign) for sign in BUG_SIGNS if sign in log), default=None)
            if at is not None:
                found.append(f"log of the {name}: {log[at : at + MAX_LOG_CHARS]}")
        return found

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


def _rss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
        return int(process.memory_info().rss)
    return 0
