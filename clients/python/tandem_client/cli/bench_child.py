"""Benchmarks of services, which run in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import typer

from tandem_client.cli.failures import ExitCode, fail


def run_bench(module: str, flags: list[str]) -> None:
    """Have a service measure itself, in its own process: clients never import services."""
    command = [sys.executable, "-m", module, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 -- our own interpreter
    # Whoever ends this command, and it alone, means the benchmark with all its processes.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            typer.echo(line, nl=False)
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if process.returncode:
        code = ExitCode.USAGE if process.returncode == ExitCode.USAGE else ExitCode.FAILED
        raise fail(f"{module} ended with {process.returncode}", code)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
