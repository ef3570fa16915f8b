"""`tandem bench`, `console`, `gateway` and `simulate`: other packages, which read all arguments."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

import typer

from tandem.process.printing_commands import started_process
from tandem_client.cli.shared.failures import fail, signal_name


def bench(context: typer.Context) -> None:
    """Measure a running server, or its parts alone."""
    run_program("bench", "tandem_bench", arguments=context.args)


def console(context: typer.Context) -> None:
    """Serve a web page that shows what a running server does."""
    run_program("console", "tandem_console", arguments=context.args)


def gateway(context: typer.Context) -> None:
    """Serve OpenAI's HTTP API in front of running servers."""
    run_program("gateway", "tandem_openai_gateway", arguments=context.args)


def simulate(context: typer.Context) -> None:
    """Compare scheduling policies on a virtual clock."""
    run_program("simulate", "tandem_simulator", arguments=context.args)


def run_program(name: str, package: str, *, arguments: list[str]) -> None:
    """
    Run a package in a process of its own: clients never import services, and these programs do.

    The process writes to our output itself, so that Ctrl-C loses none of the printed text.

    Args:
        name: Name of the command, for a message.
        package: Package with a `__main__`.
        arguments: Its arguments, `--help` too.
    """
    command = [sys.executable, "-m", package, *arguments]
    # A SIGTERM for this command alone must end the program with all its processes.
    before = signal.signal(signal.SIGTERM, _end)
    process = None
    try:
        process = started_process(
            lambda: subprocess.Popen(command)  # noqa: S603  # our own interpreter
        )
        try:
            process.wait()
        except (KeyboardInterrupt, SystemExit):
            process.terminate()
            process.wait()  # it prints what it has found until then
            raise
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if process.returncode < 0:
        raise fail(f"{name} was killed by {signal_name(-process.returncode)}")
    if process.returncode:  # it has said why
        raise typer.Exit(process.returncode)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
