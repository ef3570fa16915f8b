"""Benchmarks of services, which run in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import typer

from tandem.printing_commands import started_process
from tandem_client.cli.failures import fail, signal_name


def run_bench(module: str, flags: list[str]) -> None:
    """
    Have a service measure itself, in its own process: clients never import services.

    It writes to our output itself: what it has printed when Ctrl-C comes cannot be lost on the way.
    """
    command = [sys.executable, "-m", module, *flags]
    # Whoever ends this command, and it alone, means the benchmark with all its processes.
    before = signal.signal(signal.SIGTERM, _end)
    process = None
    try:
        process = started_process(
            lambda: subprocess.Popen(command)  # noqa: S603 -- our own interpreter
        )
        try:
            process.wait()
        except (KeyboardInterrupt, SystemExit):
            process.terminate()
            process.wait()  # it prints what it has measured until then
            raise
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if process.returncode < 0:
        raise fail(f"{module} was killed by {signal_name(-process.returncode)}")
    if process.returncode:  # it has said why
        raise typer.Exit(process.returncode)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
