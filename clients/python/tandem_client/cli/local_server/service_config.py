"""Settings of services, which they parse in processes of their own: clients never import them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.settings.options import ServiceName
from tandem_client.cli.local_server.services import plain_link
from tandem_client.cli.shared.failures import ExitCode, fail


def ask_services(arguments: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """
    Let services read their settings without starting, all at the same time.

    Args:
        arguments: Arguments of each service, by "scheduler" or "executor".

    Returns:
        The report of each service, with "settings" (name, value, source) and "warnings".

    Raises:
        typer.Exit: A service found a mistake; that of the first such service was printed.
    """
    processes = {
        service: subprocess.Popen(  # noqa: S603  # our own interpreter
            [sys.executable, "-m", f"{service}_svc.show_config", *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for service, own in arguments.items()
    }
    outcomes = {service: process.communicate() for service, process in processes.items()}
    for service, (_, errors) in outcomes.items():
        _check_outcome(service, processes[service].returncode, errors)
    return {service: json.loads(output) for service, (output, _) in outcomes.items()}


def check_model(executor_arguments: Sequence[str]) -> None:
    """
    Let the executor check its model and its memory without loading weights.

    Raises:
        typer.Exit: The executor cannot serve that model; the reason was printed.
    """
    _dry_run("executor", executor_arguments)


def memory_plan(executor_arguments: Sequence[str]) -> dict[str, Any]:
    """
    Return the memory plan of an executor as its dry run prints it, without loading weights.

    Raises:
        typer.Exit: The executor cannot serve that model; the reason was printed.
    """
    plan: dict[str, Any] = json.loads(
        _dry_run("executor", [*executor_arguments, "--log-format=json"])
    )
    return plan


def check_files(scheduler_arguments: Sequence[str]) -> None:
    """
    Let the scheduler check its certificates and its files of tokens.

    Raises:
        typer.Exit: One of them cannot be used; the reason was printed.
    """
    _dry_run("scheduler", scheduler_arguments)


def _dry_run(service: ServiceName, arguments: Sequence[str]) -> str:
    # The addresses of the link that a file may name are not used: it is a socket of our own.
    link = [*plain_link(service), "--insecure-link"]
    ran = subprocess.run(  # noqa: S603  # our own interpreter
        [sys.executable, "-m", f"{service}_svc", *arguments, *link, "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
    )
    _check_outcome(service, ran.returncode, ran.stderr)
    return ran.stdout


def _check_outcome(service: str, status: int, errors: str) -> None:
    if status == 0:
        return
    said = [line for line in errors.splitlines() if line.strip()]
    line = said[-1] if said else f"{service}_svc ended with {status}"
    raise fail(line, ExitCode.USAGE if status == ExitCode.USAGE else ExitCode.FAILED)
