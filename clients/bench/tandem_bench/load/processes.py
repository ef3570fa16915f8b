"""Load processes: their start, their common begin, and the collection of their measurements."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

from tandem.errors import InternalError
from tandem_bench.load.worker import Outcomes, Task
from tandem_bench.pipes import read_line, write_input

KILL_AFTER_S = 5.0


def run_tasks(tasks: Sequence[Task]) -> list[Outcomes]:
    """
    Run every task in a process of its own; all start sending when the last has warmed up.

    Raises:
        InternalError: A process failed; the message holds the last line on stderr.
    """
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = [stack.enter_context(_process(errors)) for _ in tasks]
        for process, task in zip(processes, tasks, strict=True):
            _say(process, task.to_json(), errors)
        for process in processes:
            _hear(process, errors)
        for process in processes:
            _say(process, "go", errors)
        return [Outcomes(**json.loads(_hear(process, errors))) for process in processes]


@contextlib.contextmanager
def _process(errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem_bench.load.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        yield process
    finally:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        process.terminate()
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _say(process: subprocess.Popen[str], line: str, errors: IO[str]) -> None:
    try:
        write_input(process, line + "\n")
    except BrokenPipeError:
        raise _failure(process, errors) from None


def _hear(process: subprocess.Popen[str], errors: IO[str]) -> str:
    try:
        return read_line(process)
    except BrokenPipeError:
        raise _failure(process, errors) from None


def _failure(process: subprocess.Popen[str], errors: IO[str]) -> InternalError:
    process.wait()
    errors.seek(0)
    lines = [line for line in errors.read().splitlines() if line.strip()]
    return InternalError(f"a load process failed: {lines[-1] if lines else 'it said nothing'}")
