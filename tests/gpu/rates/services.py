"""Both services as processes on one device, with random weights of a known size, and their metrics."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import ProxyHandler, build_opener

from tandem.errors import TandemError
from tandem_client import is_serving
from tests.e2e.cluster import Process
from tests.waiting import wait_until

BLOCK_SIZE = 16
_LOGGED_CHARACTERS = 8000
_PROCESSES = 8
"""Most processes of clients: one alone is busy with tokens before the services are."""


def services_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts that start both services."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--models", type=Path, help="where random weights are kept")
    return parser


class Services:
    """
    A scheduler and an executor that may be killed and started again at the same address.

    Entering starts both and waits until requests are served; leaving ends both, and after a failure
    prints the ends of their logs, which go with the folder.

    Attributes:
        executor: Process of the executor that was started last.
        address: The public address.
        metrics_address: Address of the scheduler's metrics.
    """

    executor: Process
    address: str
    metrics_address: str

    def __init__(
        self,
        folder: Path,
        model: Path,
        device: str,
        *,
        rows: int,
        longest: int,
        executor: Sequence[str] = (),
        scheduler: Sequence[str] = (),
    ) -> None:
        """
        Args:
            folder: Folder of sockets and logs, with a short name.
            model: Directory of the weights.
            device: Device of the executor.
            rows: Most requests that run at once; there are KV blocks for all of them.
            longest: Tokens of the longest request, output included.
            executor: Further options of the executor.
            scheduler: Further options of the scheduler.
        """
        self._folder = folder
        self._executor_options = [
            f"--model={model}",
            f"--device={device}",
            "--dtype=bfloat16",
            f"--max-num-blocks={rows * (longest // BLOCK_SIZE + 2)}",
            f"--block-size={BLOCK_SIZE}",
            f"--listen=unix:{folder}/executor.sock",
            f"--max-batch-size={rows}",
            f"--max-model-len={longest + BLOCK_SIZE}",
            *executor,
        ]
        self._scheduler_options = scheduler
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(is_failure=not isinstance(error, KeyboardInterrupt))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(is_failure=kind is not None)

    def start_executor(self) -> None:
        """Start an executor, and wait until it listens."""
        name = f"executor-{len(self._processes)}"
        self.executor = Process("executor_svc", self._executor_options, self._folder, name)
        self._processes.append(self.executor)
        self.executor.addresses()

    def is_ready(self) -> bool:
        """Return if the public port says that requests are served."""
        try:
            return is_serving(self.address, "tandem.ready", timeout_s=10)
        except TandemError:
            return False

    def _start(self) -> None:
        self.start_executor()
        ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")]
        link = f"--executor=unix:{self._folder}/executor.sock"
        options = [link, *ports, *self._scheduler_options]
        scheduler = Process("scheduler_svc", options, self._folder, "scheduler")
        self._processes.append(scheduler)
        found = scheduler.addresses()
        self.address, self.metrics_address = found["address"], found["metrics_address"]
        wait_until(self.is_ready, "tandem.ready")

    def _end(self, *, is_failure: bool) -> None:
        for process in reversed(self._processes):
            process.end()
        for log in sorted(self._folder.glob("*.log")) if is_failure else ():
            sys.stderr.write(f"{log.name}:\n{log.read_text()[-_LOGGED_CHARACTERS:]}\n")


def bench_serve(
    address: str,
    *,
    concurrency: int,
    requests: int,
    input_len: int,
    output_len: int,
    max_time_s: float,
    more: Sequence[str] = (),
) -> list[str]:
    """
    Return the command by which clients load the services and print what they measured as JSON.

    Args:
        address: The public address.
        concurrency: Requests in flight.
        requests: Requests in all.
        input_len: Tokens of each prompt.
        output_len: Tokens of each answer.
        max_time_s: Seconds after which the load ends.
        more: Further options.
    """
    options = {
        "address": address,
        "concurrency": concurrency,
        "requests": requests,
        "processes": min(_PROCESSES, concurrency),
        "input-len": input_len,
        "output-len": output_len,
        "max-time-s": max_time_s,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "tandem_client", "bench", "serve", *flags, *more, "--json"]


def metric_lines(address: str) -> list[str]:
    """Return the lines of a page of metrics."""
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text.splitlines()


def metric_sum(lines: Sequence[str], name: str) -> float:
    """Return the sum of a metric's samples, 0 where there is none yet."""
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
