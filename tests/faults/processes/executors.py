"""Executor processes that are started by forking, die in every way, and are started again."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.cluster import ROOT, environment
from tests.faults.processes.step_count import StepCount
from tests.ports import free_port
from tests.waiting import wait_until

_CLOCK_FOLDER = ROOT / "tests/faults/clock"


def clock_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that give a service a wall clock which `folder` sets."""
    file = folder / "clock"
    if not file.exists():
        file.write_bytes(bytes(8))
    paths = [str(_CLOCK_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"FAULTS_CLOCK": str(file), "PYTHONPATH": os.pathsep.join(paths)}


class Zygote:
    """
    The test's end of `tests.faults.processes.zygote`; rigs may share one.

    Attributes:
        folder: Folder of its errors and its children's wall clock.
        exit_codes: Exit code of each child that ended, by process id.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        log = folder / "zygote.err"
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.processes.zygote"],
                cwd=ROOT,
                env=environment() | clock_environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.exit_codes: dict[int, int] = {}
        hello = self._read_line()
        assert hello, log.read_text()
        threading.Thread(target=self._read, daemon=True).start()

    def fork(self, argv: list[str], log: Path, env: dict[str, str]) -> int:
        """Start an executor; return its process id."""
        assert self._process.stdin is not None
        command = {"id": 0, "argv": argv, "log": str(log), "env": env}
        with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            return self._started.get(timeout=600)

    def close(self) -> None:
        """End the process, and with it every child."""
        self._process.kill()
        self._process.wait()

    def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def _read(self) -> None:
        while news := self._read_line():
            if "started" in news:
                self.exit_codes.pop(news["pid"], None)  # process ids are reused
                self._started.put(news["pid"])
            else:
                self.exit_codes[news["ended"]] = news["code"]


@dataclass
class Executor:
    """
    One place where an executor runs: a port that its processes always use.

    Attributes:
        model: Model that the next process there serves.
        pid: Id of the process; 0 while there is none.
        deaths: Exit codes of the processes that ended.
        is_kept: True if a process that ends is started again, as an orchestrator would.
    """

    zygote: Zygote
    folder: Path
    name: str
    model: Path
    options: list[str]
    port: int = field(default_factory=free_port)
    pid: int = 0
    deaths: list[int] = field(default_factory=list)
    is_kept: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def log(self) -> Path:
        """Log of all processes of this place."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start a process."""
        ready_file = self.folder / f"{self.name}.json"
        ready_file.unlink(missing_ok=True)
        argv = [
            f"--model={self.model}",
            f"--listen=127.0.0.1:{self.port}",
            f"--ready-file={ready_file}",
            "--dtype=float32",
            "--num-threads=1",
            "--log-format=json",
            *self.options,
        ]
        with self.lock:
            self.pid = self.zygote.fork(argv, self.log, {"FAULTS_DIR": str(self.folder)})

    def look(self) -> None:
        """
        Note the death of the process, if it ended, and start another unless `is_kept` is false.
        """
        with self.lock:
            if not self.pid or self.pid not in self.zygote.exit_codes:
                return
            self.deaths.append(self.zygote.exit_codes[self.pid])
            self.pid = 0
            if self.is_kept:
                self.start()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, unless it has just died."""
        with self.lock, suppress(ProcessLookupError):
            if self.pid and self.pid not in self.zygote.exit_codes:
                os.kill(self.pid, number)

    def end(self) -> None:
        """Kill -9 the process and wait for its end; no other process is started."""
        with self.lock:
            self.is_kept = False
            pid = self.pid
            if not pid:
                return
            self.signal(signal.SIGKILL)
        wait_until(lambda: pid in self.zygote.exit_codes, "end of an executor")
        with self.lock:
            self.deaths.append(self.zygote.exit_codes[pid])
            self.pid = 0

    def num_steps(self) -> int:
        """Return the number of steps that the present process computed."""
        try:
            return StepCount(self.folder, self.pid).read()
        except (FileNotFoundError, ValueError):
            return 0

    def process(self) -> psutil.Process | None:
        """Return the present process, if there is one."""
        return psutil.Process(self.pid) if self.pid else None


def working(executors: list[Executor]) -> Executor:
    """Return the executor that is the next to compute a step."""
    if len(executors) == 1:
        return executors[0]
    before = [(executor, executor.num_steps()) for executor in executors]

    def gaining() -> list[Executor]:
        return [executor for executor, count in before if executor.num_steps() > count]

    return wait_until(gaining, "a step of any executor")[0]
