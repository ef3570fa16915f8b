"""
Helpers in processes of their own, controlled by lines of JSON: they and the tests' own thread pool
and event loop do not slow each other down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ROOT, environment

Json = dict[str, Any]


class Controlled:
    """
    The test's end of a helper: it starts the process, sends a command, and waits for the answer.
    """

    def __init__(
        self, module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            module: Module to run with -m.
            *arguments: Its command line.
            log: File for its stderr.
            env: Variables to add to the environment.
        """
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=environment() | dict(env or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._log = log
        self._lock = threading.Lock()
        self.hello = self._answer()

    def ask(self, command: str, **arguments: Any) -> Json:
        """Send a command and wait for the answer."""
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
            return self._answer()

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> Json:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the helper ended: {self._log.read_text()[-4000:]}"
        answer: Json = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer


def serve_commands(hello: Json, commands: Mapping[str, Callable[..., Json | None]]) -> None:
    """
    Serve the helper's end: print a first line, then run each command that comes, until stdin ends.

    Args:
        hello: The first line.
        commands: Functions by the name of their command; called with the command's other keys.
    """
    _say(hello)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            _say(commands[name](**request) or {})
        except Exception as error:  # noqa: BLE001  # whatever it is, the test must learn of it
            _say({"error": f"{name}: {error!r}"})
    os._exit(0)


def _say(answer: Json) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
