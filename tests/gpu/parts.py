"""The parts of a run on a GPU: what each starts, for how long, and what its output means."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_KILL_AFTER_S = 5.0
_POLL_S = 0.02
_TOLD_LINES = 12
_LOGGED_CHARACTERS = 60_000
_VERDICT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
_BEGUN = re.compile(r"^(\S+\.py::.*\S) *$")

Tell = Callable[["Outcome"], None]


EXIT_NO_DEVICE = 3
"""Exit code of what needs a GPU on a machine that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    One child process.

    Attributes:
        name: Name in tables.
        arguments: Arguments of python.
        limit_s: Time after which it is killed.
        least_s: Time that must be left for it to be started.
        read: Function that makes rows of what it printed to stdout, whole or broken off.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float
    least_s: float = 10.0
    read: Callable[[str], list[dict[str, Any]]] = field(default_factory=lambda: read_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    Outcome of a part.

    Attributes:
        name: Name of the part.
        status: "passed", "failed", "timed out" or "skipped".
        seconds: Time that it took.
        rows: Rows that it found.
        detail: Reason that it did not pass: the end of what it said.
        log: Everything that it said, or the end of that.
        made: When, where and of which commit it was made.
    """

    name: str
    status: str
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""
    log: str = ""
    made: dict[str, str] = field(default_factory=dict)


def run_parts(
    parts: Sequence[Part],
    *,
    left_s: float,
    environment: dict[str, str],
    tell: Tell,
    at_once: int = 1,
) -> None:
    """
    Run parts, in order and some side by side, within the time that is left. A part that fails or
    hangs costs the others no more than that time; no process is left, whatever ends the call.

    Args:
        parts: Parts to run.
        left_s: Seconds for all of them.
        environment: Environment of the processes.
        tell: Function that gets each outcome as it comes.
        at_once: Number of parts that run at a time.
    """
    ends_s = time.monotonic() + left_s
    waiting = list(parts)
    running: list[Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                part, now_left_s = waiting.pop(0), ends_s - time.monotonic()
                if now_left_s < part.least_s:
                    why = f"{now_left_s:.0f} s were left, it needs {part.least_s:.0f}"
                    tell(Outcome(name=part.name, status="skipped", seconds=0.0, detail=why))
                else:
                    running.append(Child(part, min(part.limit_s, now_left_s), environment))
            time.sleep(_POLL_S)
            for child in [child for child in running if child.is_over()]:
                child.end()
                running.remove(child)
                tell(child.outcome())
    finally:
        for child in running:
            child.ask()
        for child in running:
            child.end(_KILL_AFTER_S)


def read_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON list; of one that broke off, its whole rows."""
    try:
        rows: list[dict[str, Any]] = json.loads(text)
    except ValueError:
        broken_off = text.rstrip().removesuffix(",")
        if not broken_off.startswith("["):
            raise
        rows = json.loads(broken_off + "]")
    return rows


def nothing_read(_text: str) -> list[dict[str, Any]]:
    """Return no rows, for a part that is not asked for any."""
    return []


def count_tests(text: str) -> list[dict[str, Any]]:
    """
    Return the counts of pytest's lines, one for each test, with the names of failures, and the test
    that was running when the lines broke off, which is where it hung or what crashed it.
    """
    lines = text.strip().splitlines()
    found = _VERDICT.findall(text)
    if not found and not any("collected" in line or "no tests ran" in line for line in lines):
        raise ValueError(f"no count of tests in {lines[-1] if lines else ''!r}")
    counts = {
        name.lower(): sum(verdict == name for _, verdict in found)
        for name in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    failures = [test for test, verdict in found if verdict in {"FAILED", "ERROR"}]
    begun = _BEGUN.match(lines[-1]) if lines else None
    return [{**counts, "failures": failures, "broke off in": [begun[1]] if begun else []}]


class Child:
    """A part's process, which may have started others, with files for what they say."""

    def __init__(self, part: Part, limit_s: float, environment: dict[str, str]) -> None:
        """Start the process."""
        self._part = part
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # `outcome` closes
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # likewise
        self._started_s = time.monotonic()
        self._limit_s = limit_s
        self._asked_s: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    def is_over(self) -> bool:
        """
        Return whether the process has ended, or has used up the time that it got to end by itself.
        """
        if self._process.poll() is not None:
            return True
        now_s = time.monotonic()
        if self._asked_s is not None:
            return now_s - self._asked_s > _KILL_AFTER_S
        if now_s - self._started_s > self._limit_s:
            self.ask()
        return False

    def ask(self) -> None:
        """Ask the process, and those that it started, to end."""
        self._asked_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def end(self, patience_s: float = 0.0) -> None:
        """Kill what is left of the process and of those that it started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds never ends
            self._process.wait(_KILL_AFTER_S)

    def outcome(self) -> Outcome:
        """Return the outcome of the part, once its process has ended."""
        code = None if self._asked_s is not None else self._process.returncode
        seconds = time.monotonic() - self._started_s
        with self._output as output, self._errors as errors:
            output.seek(0)
            errors.seek(0)
            printed, said = output.read(), errors.read()
        return _outcome(self._part, code, seconds, printed, said)


def _outcome(part: Part, code: int | None, seconds: float, printed: str, said: str) -> Outcome:
    rows, problem, unread = [], "", ""
    try:
        rows = part.read(printed)
    except (ValueError, IndexError) as error:
        problem, unread = f"its output cannot be read: {error}", _end_of(printed)
    detail = _end_of(said)
    if code == 0 and not problem:
        status = "passed"
    else:
        status = "timed out" if code is None else "failed"
        problem = problem if code is None else f"exit code {code}; {problem}".removesuffix("; ")
        detail = "\n".join(filter(None, (problem, unread, detail)))
    log = f"{printed}\n{said}".strip()[-_LOGGED_CHARACTERS:]
    return Outcome(
        name=part.name, status=status, seconds=seconds, rows=rows, detail=detail, log=log
    )


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TOLD_LINES:])
