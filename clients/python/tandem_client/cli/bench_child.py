"""Benchmarks of services, which run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

import typer

from tandem.printing_commands import started_process
from tandem_client.cli.failures import fail, signal_name

_READ_BYTES = 1 << 16


def run_bench(module: str, flags: list[str]) -> None:
    """Have a service measure itself, in its own process: clients never import services."""
    command = [sys.executable, "-m", module, *flags]
    # Whoever ends this command, and it alone, means the benchmark with all its processes.
    before = signal.signal(signal.SIGTERM, _end)
    process = None
    try:
        process = started_process(
            lambda: subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 -- our own interpreter
        )
        try:
            _pass_on(process)
        except (KeyboardInterrupt, SystemExit):
            process.terminate()
            _pass_on(process)  # what it has measured until then
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


def _pass_on(process: subprocess.Popen[bytes]) -> None:
    """
    Print what the process prints, as soon as it does, until it ends.

    Nothing is buffered on the way: the half of a line that is read already when Ctrl-C comes would
    be lost with the buffer.
    """
    assert process.stdout is not None
    while printed := os.read(process.stdout.fileno(), _READ_BYTES):
        typer.echo(printed, nl=False)
    process.wait()


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
