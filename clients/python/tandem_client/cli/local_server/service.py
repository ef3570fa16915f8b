"""One child process that never outlives its command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem_client.cli.shared.failures import ExitCode, signal_name

CHILD = Path(__file__).with_name("child.py")
_REASON_LINE = re.compile(r"^[A-Z][A-Z_]+: .+")
_ERROR_LINE = re.compile(r'\[error *\]|"level": ?"error"')


class ServiceFailed(Exception):
    """Error of a child process that ended unexpectedly or did not become ready."""

    def __init__(self, line: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(line)
        self.line = line
        self.code = code


class Service:
    """One child process, in a process group of its own, with its log and ready file."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], folder: Path, number: int = 0
    ) -> None:
        """
        Args:
            name: Name of the program, for the user and for files.
            module: Module to run, with an argument for the ready file behind `arguments`.
            arguments: Its arguments.
            folder: Folder of its log and its ready file.
            number: Number among several of this program, from 1; 0 = it is alone.
        """
        self.program = name
        self.name = f"{name}-{number}" if number else name
        self._called = f"{name} {number}" if number else f"the {name}"
        name = self.name
        self.log = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.json"
        shim = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]
        command = [sys.executable, "-m", module, *arguments, "--ready-file", str(self._ready_file)]
        self._command = [*shim, *command]
        self.log.write_bytes(b"")
        self._ready_file.unlink(missing_ok=True)  # of an earlier server
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # In a group of its own: Ctrl-C in the terminal reaches only us, and we stop the
            # services in the right order.
            return subprocess.Popen(  # noqa: S603  # our own interpreter
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def replace(self, argument: str, other: str) -> None:
        """Have the next start use another argument, such as a port that this one got."""
        self._command = [other if one == argument else one for one in self._command]

    def restart(self) -> None:
        """Start the process again after it ended; its log is appended to."""
        self.kill()
        self._ready_file.unlink(missing_ok=True)
        self.process = self._spawn()

    def addresses(self) -> dict[str, Any] | None:
        """Return the content of the ready file; None before it exists."""
        try:
            content: dict[str, Any] = json.loads(self._ready_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return content

    def check(self) -> None:
        """
        Make sure that the process runs.

        Raises:
            ServiceFailed: The process ended; the line has its `last_word`.
        """
        status = self.process.poll()
        if status is None:
            return
        code = ExitCode.USAGE if status == ExitCode.USAGE else ExitCode.FAILED
        if status < 0:
            raise ServiceFailed(f"{self._called} was killed by {signal_name(-status)}", code)
        raise ServiceFailed(f"{self._called} ended (exit code {status}): {self.last_word()}", code)

    def ask_to_end(self) -> None:
        """Ask the process to end, and do not wait for that."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_or_kill(self, limit_s: float) -> None:
        """Wait until the process ends, and kill it after a limit; kill the rest of its group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        self.kill()

    def kill(self) -> None:
        """Kill its whole process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_word(self) -> str:
        """Return the last error it reported, or else logged, or else the last line it wrote."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        reasons = [line for line in lines if _REASON_LINE.match(line)]
        errors = [line for line in lines if _ERROR_LINE.search(line)]
        written = [line for line in lines if line]
        return (reasons or errors or written or [f"it wrote nothing to {self.log}"])[-1]
