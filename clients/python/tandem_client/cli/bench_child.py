"""Benchmarks, which run in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import typer

from tandem.printing_commands import started_process
from tandem_client.cli.failures import fail, signal_name


def run_bench(arguments: list[str]) -> None:
    """
    Measure in a process of its own: clients never import services, and benchmarks do.

    The process writes to our output itself, so that Ctrl-C loses none of the printed text.
    """
    command = [sys.executable, "-m", "tandem_bench", *arguments]
    # A SIGTERM for this command alone must end the benchmark with all its processes.
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
        raise fail(f"bench {arguments[0]} was killed by {signal_name(-process.returncode)}")
    if process.returncode:  # it has said why
        raise typer.Exit(process.returncode)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
