"""Processes of one measurement of the step link, and the accounts that they give."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from tandem.process.printing_commands import started_process
from tandem_bench.link.requests import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    generate_requests,
)
from tandem_bench.reader import Reader, start_reader

START_DEADLINE_S = 60.0
_POLL_S = 0.02
_STOP_DEADLINE_S = 20.0
_SEES_STEPS_S = 0.1
_QUIET = {"GRPC_VERBOSITY": "ERROR"}
"""Environment that keeps gRPC's native library from logging each peer that ends."""


_TRY_AGAIN = {"14", "8"}
"""
gRPC statuses after which streams are opened again: UNAVAILABLE, since a frontend does not know the
executor yet, and RESOURCE_EXHAUSTED, since the core still has the streams of the last attempt.
"""


class BenchFailed(Exception):
    """A process of the benchmark ended or did not get ready in time."""


class Process:
    """Child process that runs a module of ours; `close` ends it in any case."""

    def __init__(self, arguments: Sequence[str], *, reads_input: bool = False) -> None:
        self._name = arguments[0]
        self.process = started_process(
            lambda: subprocess.Popen(  # noqa: S603  # our own interpreter
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE if reads_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=_QUIET | os.environ,
            )
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def line(self) -> str:
        """
        Return the next line that it prints.

        Raises:
            BenchFailed: It printed none in time, or ended.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], START_DEADLINE_S)[0]:
            raise BenchFailed(f"{self._name} said nothing for {START_DEADLINE_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise BenchFailed(f"{self._name} ended with {self.process.wait()}")
        return line

    def wait_for(self, is_ready: Callable[[], bool], what: str) -> None:
        """
        Poll until `is_ready`; `what` begins the error's text.

        Raises:
            BenchFailed: The process ended, or was not ready in time.
        """
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not is_ready():
            if self.process.poll() is not None:
                raise BenchFailed(f"{self._name} ended with {self.process.returncode}")
            if time.monotonic() > deadline_s:
                raise BenchFailed(f"{what} within {START_DEADLINE_S:.0f} s")
            time.sleep(_POLL_S)

    def listening(self, ready_file: Path, what: str) -> str:
        """
        Return the address on which the process listens, once it has written its ready file.

        Raises:
            BenchFailed: It ended, or did not listen in time; `what` begins the error's text.
        """
        with self.closed_on_failure():
            self.wait_for(ready_file.exists, what)
            address: str = json.loads(ready_file.read_text())["address"]
        return address

    def close(self) -> None:
        """End it: by the end of its input or SIGTERM, and by SIGKILL if that takes too long."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        else:
            self.process.terminate()
        try:
            self.process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the process if a constructor fails, by Ctrl-C too: its caller gets no object."""
        try:
            yield
        except BaseException:
            Process.close(self)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FixedStepExecutor(Process):
    """Executor process without a model; see tandem_bench.fixed_step."""

    def __init__(self, step_ms: float, rows: int, transport: str, directory: Path) -> None:
        ready_file = directory / "executor.json"
        ready_file.unlink(missing_ok=True)
        listen = f"unix:{directory}/executor.sock" if transport == "unix" else "127.0.0.1:0"
        super().__init__(
            (
                "tandem_bench.fixed_step",
                f"--step-ms={step_ms}",
                f"--rows={rows}",
                f"--listen={listen}",
                f"--max-num-blocks={NUM_BLOCKS}",
                f"--block-size={BLOCK_SIZE}",
                f"--max-model-len={MAX_MODEL_LEN}",
                f"--ready-file={ready_file}",
                "--log-level=error",
            )
        )
        self.address = self.listening(ready_file, "the executor did not listen")

    def report(self) -> dict[str, float]:
        """Ask for its totals of steps, busy and idle time until now."""
        self.process.send_signal(signal.SIGUSR1)
        return dict(json.loads(self.line()))

    def wait_for_rows(self, rows: int) -> None:
        """Wait until all steps of a short span have this many rows."""

        def is_steady() -> bool:
            before = self.report()
            time.sleep(_SEES_STEPS_S)
            after = self.report()
            num_steps = after["steps"] - before["steps"]
            return num_steps > 0 and after["rows"] - before["rows"] == rows * num_steps

        self.wait_for(is_steady, f"no {rows} requests ran together")


class FixedStepExecutors:
    """
    Executors that serve together.

    Attributes:
        address: Their addresses, as for `--executor`.
    """

    def __init__(
        self, count: int, step_ms: float, rows: int, transport: str, directory: Path
    ) -> None:
        self._opened = contextlib.ExitStack()
        self._executors: list[FixedStepExecutor] = []
        with self._opened:
            for number in range(count):
                own = directory / str(number)
                own.mkdir()
                executor = FixedStepExecutor(step_ms, rows, transport, own)
                self._executors.append(self._opened.enter_context(executor))
            self._opened = self._opened.pop_all()
        self.address = ",".join(executor.address for executor in self._executors)

    def __len__(self) -> int:
        return len(self._executors)

    def report(self) -> dict[str, float]:
        """Return the sums of their totals until now."""
        totals: dict[str, float] = {}
        for executor in self._executors:
            for name, value in executor.report().items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def cpu_ns(self) -> int:
        """Return the CPU time of all their processes."""
        return sum(cpu_ns(executor.pid) for executor in self._executors)

    def wait_for_rows(self, rows: int) -> None:
        """Wait until all steps of each, in a short span, have this many rows."""
        for executor in self._executors:
            executor.wait_for_rows(rows)

    def close(self) -> None:
        """End them all."""
        self._opened.close()


class Core(Protocol):
    """Core process that keeps executors busy."""

    @property
    def pid(self) -> int:
        """Process id of the core process."""

    def check(self) -> None:
        """Raise BenchFailed where a stream lost output."""

    def close(self) -> None:
        """End the process."""


class CoreAlone(Process):
    """Core process without frontends; see tandem_bench.link.worker."""

    def __init__(
        self,
        executors: FixedStepExecutors,
        rows: int,
        window: int,
        run_ahead: int,
        *,
        directory: Path,
    ) -> None:
        super().__init__(
            (
                "tandem_bench.link.worker",
                f"--executor={executors.address}",
                f"--directory={directory}",
                f"--rows={rows}",
                f"--window={window}",
                f"--run-ahead={run_ahead}",
            ),
            reads_input=True,
        )
        with self.closed_on_failure():
            self.line()

    def check(self) -> None:
        """Check nothing: there are no streams."""


class SchedulerService(Process):
    """Whole scheduler service that listens on a free port and has no other servers."""

    def __init__(
        self, executor: FixedStepExecutor | FixedStepExecutors, directory: Path, *options: str
    ) -> None:
        """
        Start the service and wait until it listens.

        Args:
            executor: Executor that it uses, or several.
            directory: Directory for the ready file.
            options: Further arguments of the service.

        Raises:
            BenchFailed: It ended, or did not listen in time.
        """
        ready_file = directory / "scheduler.json"
        ready_file.unlink(missing_ok=True)
        super().__init__(
            (
                "scheduler_svc",
                f"--executor={executor.address}",
                "--listen=127.0.0.1:0",
                "--admin-listen=",
                "--metrics-listen=",
                f"--ready-file={ready_file}",
                "--drain-grace-s=0",
                "--log-level=error",
                *options,
            )
        )
        self.address = self.listening(ready_file, "the scheduler did not listen")


class CoreWithClients(SchedulerService):
    """Whole scheduler service with a reader of its streams."""

    def __init__(
        self,
        executors: FixedStepExecutors,
        rows: int,
        window: int,
        run_ahead: int,
        *,
        clients: int,
        directory: Path,
    ) -> None:
        """Start the service, and let `clients` of each executor have its `rows` together."""
        super().__init__(
            executors,
            directory,
            f"--max-num-seqs={rows * len(executors)}",
            f"--window={window}",
            f"--run-ahead={run_ahead}",
        )
        with self.closed_on_failure():
            requests = generate_requests(
                clients * len(executors), rows // clients, executors=len(executors)
            )
            self._reader = started_reader(self.address, requests)

    def check(self) -> None:
        """
        Check the counts of the streams.

        Raises:
            BenchFailed: A stream did not start, failed, or lost, repeated or garbled output.
        """
        counts = self._reader.report()
        num_bad = counts.failed + counts.bad_offsets + counts.malformed
        if num_bad or counts.started < counts.streams:
            raise BenchFailed(f"not all streams were served: {counts}")

    def close(self) -> None:
        """Close the streams, then the service."""
        self._reader.close()
        super().close()


def started_reader(
    address: str, requests: Sequence[bytes], *, connections: int = 4, ca: Path | None = None
) -> Reader:
    """
    Open streams and return once all were accepted; see `start_reader`.

    A service that listens may have frontends that do not know the executor yet: then all streams
    are opened again.

    Raises:
        BenchFailed: The streams did not start in time, or failed for another reason.
    """
    deadline_s = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.ExitStack() as opened:
            reader = opened.enter_context(
                start_reader(address, requests, connections=connections, ca=ca)
            )
            if _have_started(reader, deadline_s):
                opened.pop_all()
                return reader
        time.sleep(_POLL_S)


def _have_started(reader: Reader, deadline_s: float) -> bool:
    """Wait until all streams were accepted; return False where they must be opened again."""
    while (counts := reader.report()).started < counts.streams or counts.failed:
        is_late = time.monotonic() > deadline_s
        if is_late or not counts.statuses.keys() <= _TRY_AGAIN:
            raise BenchFailed(f"streams did not start: {counts}")
        if counts.failed:
            return False
        time.sleep(_POLL_S)
    return True


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all live threads of a process, as the kernel's scheduler counts it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total
