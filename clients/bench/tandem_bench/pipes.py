"""Standard input and output of processes that measure for us."""

from __future__ import annotations

import subprocess
from typing import AnyStr


def write_input(process: subprocess.Popen[AnyStr], content: AnyStr) -> None:
    """
    Write to the standard input of a process.

    Raises:
        BrokenPipeError: The process has ended.
    """
    assert process.stdin is not None
    process.stdin.write(content)
    process.stdin.flush()


def read_line(process: subprocess.Popen[AnyStr]) -> AnyStr:
    """
    Return the next line of the standard output of a process.

    Raises:
        BrokenPipeError: The process has ended.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BrokenPipeError("the process has ended")
    return line
