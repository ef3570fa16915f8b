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
_TOLD_LINES = 12
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    One child process.

    Attributes:
        name: In tables.
        arguments: Of python.
        limit_s: It is killed after so long.
        least_s: With less time left it is not started.
        read: Makes rows of what it printed to stdout.
        allowed_codes: Exit codes with which its rows count.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float
    least_s: float = 10.0
    read: Callable[[str], list[dict[str, Any]]] = json.loads
    allowed_codes: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    What became of a part.

    Attributes:
        name: The part's.
        status: "passed", "failed", "timed out" or "skipped".
        seconds: It took.
        rows: What it found.
        detail: Why it did not pass: the end of what it said.
    """

    name: str
    status: str
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""


def run_part(part: Part, left_s: float, environment: dict[str, str]) -> Outcome:
    """
    Run a part, with everything it starts, within the time that is left.

    Args:
        part: What to run.
        left_s: Of the whole run's budget, seconds.
        environment: Of the process.
    """
    if left_s < part.least_s:
        why = f"{left_s:.0f} s were left, it needs {part.least_s:.0f}"
        return Outcome(name=part.name, status="skipped", seconds=0.0, detail=why)
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        code = _wait(process, min(part.limit_s, left_s))
        seconds = time.monotonic() - started_s
        output.seek(0)
        errors.seek(0)
        printed, said = output.read(), errors.read()
    return _outcome(part, code, seconds, printed, said)


def count_tests(text: str) -> list[dict[str, Any]]:
    """What pytest's closing line counts, and the failures it names."""
    lines = text.strip().splitlines()
    counts = {name.rstrip("s"): int(number) for number, name in _COUNTS.findall(lines[-1])}
    if not counts:
        raise ValueError(f"no count of tests in {lines[-1]!r}")
    failures = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [counts | {"failures": failures}]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """
    The exit code; None if time was up. Whatever ends the wait, nothing of the process is left: it may end what it started, and
    is killed if it does not.
    """
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(part: Part, code: int | None, seconds: float, printed: str, said: str) -> Outcome:
    rows, problem, unread = [], "", ""
    try:
        rows = part.read(printed)
    except (ValueError, IndexError) as error:
        problem, unread = f"its output cannot be read: {error}", _end_of(printed)
    if code is None:
        status = "timed out"
    elif code in part.allowed_codes and not problem:
        return Outcome(
            name=part.name, status="passed", seconds=seconds, rows=rows, detail=_end_of(said)
        )
    else:
        status = "failed"
        problem = f"exit code {code}; {problem}".removesuffix("; ")
    detail = "\n".join(filter(None, (problem, unread, _end_of(said))))
    return Outcome(name=part.name, status=status, seconds=seconds, rows=rows, detail=detail)


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TOLD_LINES:])
