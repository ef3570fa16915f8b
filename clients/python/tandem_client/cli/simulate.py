"""`tandem simulate`: the scheduler core with a simulated executor."""

from __future__ import annotations

import subprocess
import sys

import typer

from tandem_client.cli.shared.failures import ExitCode, readable_errors


@readable_errors
def simulate(context: typer.Context) -> None:
    """Compare scheduling policies on a virtual clock."""
    # In a process of its own: clients never import services.
    command = [sys.executable, "-m", "tandem_simulator", *context.args]
    outcome = subprocess.run(command, check=False)  # noqa: S603  # our own interpreter
    if outcome.returncode:
        # A negative return code is the number of the signal that ended the process.
        code = outcome.returncode if outcome.returncode > 0 else ExitCode.FAILED
        raise typer.Exit(code)
