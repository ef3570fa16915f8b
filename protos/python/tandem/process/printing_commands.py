"""Common parts of commands that print their results: their end by signals and failed output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from tandem.process.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED

_ENDING = (signal.SIGINT, signal.SIGTERM)

_SWALLOWED_AFTER_S = 0.1
"""Seconds between two looks at whether the end that a signal began is still on its way."""

Started = TypeVar("Started", subprocess.Popen[str], subprocess.Popen[bytes])


class EndedBySignal(SystemExit):
    """Ctrl-C or SIGTERM ends the process; a command may catch it to print the results so far."""


def run_printing(name: str, command: Callable[[], int]) -> int:
    """
    Run a command that prints to stdout, and return its exit code.

    Ctrl-C ends it with 130, SIGTERM with 143 and a closed pipe with 1, all without output and after
    the command has ended its processes and removed its files. Output that cannot be written, on a
    full disk for example, ends it with one line on stderr and 1.

    Args:
        name: Start of that line.
        command: Does the work and returns the exit code.
    """
    end_by_signals()
    try:
        code = command()
        sys.stdout.flush()
        _pass_signals_over()  # the work is done; Python would report a signal during its exit
    except EndedBySignal:
        _pass_signals_over()
        raise
    except BrokenPipeError:
        forget_output()
        return EXIT_FAILED
    except OSError as error:
        forget_output()
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        sys.stderr.write(f"{name}: {what}{error.strerror or error}\n")
        return EXIT_FAILED
    return code


def end_by_signals() -> None:
    """
    Have SIGINT and SIGTERM end this process by EndedBySignal, so that open resources are closed.

    Only the first signal counts: a terminal signals the whole group and a parent may pass the
    signal on, and the second must not interrupt what the first began. Both handlers stay for good.

    A signal interrupts any code, and some libraries catch every exception and go on; NumPy does
    while it imports its generators. An end that was lost like this begins again.
    """
    ending: weakref.ref[EndedBySignal] | None = None

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if ending is None:
            threading.Thread(target=begin_again, args=(number,), daemon=True).start()
        elif ending() is not None:
            return
        raised = EndedBySignal(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)
        ending = weakref.ref(raised)
        try:
            raise raised
        finally:
            del raised  # its traceback has this frame, which would keep it alive

    def begin_again(number: int) -> None:
        # An exception that passes frames, or waits for their `finally`, is alive. Who catches it on
        # purpose replaces the handler before the exception is gone, so the handler is read last.
        while threading.main_thread().is_alive():
            lost = ending is not None and ending() is None
            if signal.getsignal(number) is not end:
                return
            if lost:
                os.kill(os.getpid(), number)
            time.sleep(_SWALLOWED_AFTER_S)

    for number in _ENDING:
        signal.signal(number, end)


def started_process(start: Callable[[], Started]) -> Started:
    """
    Start a process; if SIGTERM arrives meanwhile, kill it, as the caller does not have it yet.

    SIGINT is ignored meanwhile, and by the new process until it sets a handler. A terminal sends
    SIGINT to both; the caller then ends the process, without a traceback from its imports.

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
    Ignore a signal, also one that arrived before but was not handled yet.

    With SIG_IGN, Python would print "Signal 15 ignored due to race condition" with a traceback.
    """


def forget_output() -> None:
    """Point stdout at /dev/null, as Python writes its buffer at exit and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
