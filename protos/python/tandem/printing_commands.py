"""What the commands that print their results have in common: how they end when they cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143
_ENDING = (signal.SIGINT, signal.SIGTERM)

Started = TypeVar("Started", subprocess.Popen[str], subprocess.Popen[bytes])


class EndedBySignal(SystemExit):
    """Ctrl-C or SIGTERM ends the process; on the way a command may still print what it has."""


def run_printing(name: str, command: Callable[[], int]) -> int:
    """
    Run a command that prints to stdout, and give its exit code.

    Ctrl-C ends it with 130, SIGTERM with 143 and a reader that left with 1, all without a word and
    after it has ended its processes and removed its files; output that cannot be written, on a full
    disk say, ends it with one line and 1.

    Args:
        name: What the line starts with.
        command: Does the work and gives the exit code.
    """
    end_by_signals()
    try:
        code = command()
        sys.stdout.flush()
        _pass_signals_over()  # its work is done; Python would tell of one that interrupts the exit
    except BrokenPipeError:
        _forget_output()
        return EXIT_FAILED
    except OSError as error:
        _forget_output()
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        sys.stderr.write(f"{name}: {what}{error.strerror or error}\n")
        return EXIT_FAILED
    return code


def end_by_signals() -> None:
    """
    Have SIGINT and SIGTERM end this process by EndedBySignal, so that what is open is closed.

    Only the first one: a terminal tells the whole group and a parent may pass it on, and the second
    must not break off what the first began. Takes over both signals for good.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        _pass_signals_over()
        raise EndedBySignal(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)

    for number in _ENDING:
        signal.signal(number, end)


def started_process(start: Callable[[], Started]) -> Started:
    """
    Start a process, and leave none behind if SIGTERM comes in the middle: then nobody has it yet.

    SIGINT is ignored meanwhile, and by the process until it sets a handler: a terminal sends it to
    both, and whoever started the process ends it, without a traceback of its imports.

    Args:
        start: Makes a `subprocess.Popen`.
    """
    if threading.current_thread() is not threading.main_thread():
        return start()  # signals end the main thread alone
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _ENDING}
    signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start()
        if came:
            process.kill()
            process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(signal.SIGTERM)
    return process


def _pass_signals_over() -> None:
    for number in _ENDING:
        signal.signal(number, _pass_over)


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """
    Ignore a signal, unlike SIG_IGN also one that has come but not been handled yet.

    Of such a one Python would write "Signal 15 ignored due to race condition" with a traceback.
    """


def _forget_output() -> None:
    """Else Python would fail once more when it writes at exit what is still in the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
