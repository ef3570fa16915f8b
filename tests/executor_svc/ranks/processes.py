"""Executors of several ranks as real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import grpc
import psutil

from tandem.errors import TandemError
from tandem_client import is_serving
from tests.e2e.cluster import Process
from tests.executor_svc.server.test_process import wait_ready
from tests.ports import free_port
from tests.waiting import wait_until

GONE_S = 30.0
"""Seconds in which all ranks are gone on any machine; they take half a second, or two if silent."""


class RankedExecutor:
    """One executor of several ranks, ready to serve."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, tp_size: int = 2, pp_size: int = 1
    ) -> None:
        arguments = [f"--model={model}", "--listen=127.0.0.1:0", "--dtype=float32", *flags]
        sizes = [f"--tp-size={tp_size}", f"--pp-size={pp_size}"]
        self._service = Process("executor_svc", [*arguments, *sizes], folder, "ranks")
        self.log = self._service.log
        self.address: str = self._service.addresses()["address"]
        with grpc.insecure_channel(self.address) as channel:
            wait_ready(channel)
        self.ranks = self._service.family()

    @property
    def process(self):
        return self._service.process

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, number)

    def wait_gone(self) -> None:
        """Wait until no rank is left; rank 0 is a child of ours and leaves its exit code."""
        wait_until(lambda: not any(map(is_alive, self.ranks)), "all ranks to be gone", GONE_S)
        self.process.wait(GONE_S)

    def end(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        self._service.end()


def start_pods(
    module: str,
    model: Path,
    folder: Path,
    *flags: str,
    generation: int = 0,
    env: Mapping[str, str] | None = None,
) -> list[Process]:
    """
    Start the two ranks of an executor one by one, each told its place by the variables of a
    LeaderWorkerSet. Later generations in a folder have logs of their own.
    """
    shared = {
        **(env or {}),
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    arguments = [f"--model={model}", "--dtype=float32", *flags]
    return [
        Process(
            module,
            arguments,
            folder,
            f"pod{rank}-{generation}",
            shared | {"LWS_WORKER_INDEX": str(rank)},
        )
        for rank in range(2)
    ]


def is_ready(address: str) -> bool:
    """Tell whether a scheduler says that requests are served; not while it is too busy to say."""
    try:
        return is_serving(address, "tandem.ready", timeout_s=5)
    except TandemError:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
