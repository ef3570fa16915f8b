"""A program of a client as an operating system process: commands go in, results come out."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clients.conformance.programs import ROOT, Program
from tests.e2e.cluster import environment
from tests.waiting import wait_until

Json = dict[str, Any]
PATIENCE_S = 120.0
"""Seconds to wait for what must come: a slow machine takes its time."""


class Command:
    """A command that was begun, and what the program has said about it."""

    def __init__(self, player: Player, name: str) -> None:
        self._player = player
        self.name = name
        self.events: list[str] = []
        self._result: Json | None = None

    def take(self, line: Json) -> None:
        """Keep a line that the program printed about it."""
        if "event" in line:
            self.events.append(line["event"])
        else:
            assert self._result is None, f"{self}: a second result"
            self._result = line["result"]

    @property
    def is_done(self) -> bool:
        """True when the result is there."""
        return self._result is not None

    def result(self) -> Json:
        """Wait for the result."""
        self.wait_until(lambda: self.is_done, "a result")
        assert self._result is not None
        return self._result

    def wait_for(self, event: str) -> None:
        """Wait until the caller got an event of this kind; a result before it is a failure."""
        self.wait_until(lambda: event in self.events or self.is_done, event)
        assert event in self.events, (str(self), self._result)

    def wait_until(self, condition: Any, what: str) -> None:
        """Wait for a condition, and fail as soon as the program has ended."""
        try:
            wait_until(lambda: condition() or self._player.has_ended, what, PATIENCE_S)
            assert condition(), "the program ended"
        except AssertionError as error:
            raise AssertionError(f"{self}: {error}\n{self._player.errors()}") from error

    def __str__(self) -> str:
        return f"{self._player.program.name}, command {self.name}"


class Player:
    """A running program, which carries out commands at the same time."""

    def __init__(
        self, program: Program, folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start it; its variables are those of `environment` and the given ones."""
        self.program = program
        self._log = folder / f"{program.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                program.command,
                cwd=ROOT,
                env=environment() | dict(variables or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
            )
        self._commands: dict[str, Command] = {}
        self._names = itertools.count(1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """True when the program will print nothing more."""
        return not self._reader.is_alive()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def begin(self, **command: Any) -> Command:
        """Let the program begin a command."""
        begun = Command(self, str(next(self._names)))
        self._commands[begun.name] = begun
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"id": begun.name, **command}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise AssertionError(f"{begun}: the program ended; {self.errors()}") from error
        return begun

    def ask(self, **command: Any) -> Json:
        """Let the program carry out a command, and wait for its result."""
        return self.begin(**command).result()

    def errors(self) -> str:
        """Return the end of what the program printed for people."""
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> int:
        """End the input, and return the exit status of the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            self._commands[line.pop("id")].take(line)
