"""Flags that `tandem up` passes on although it cannot know them: those that serve nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from tandem_client.cli.shared.failures import ExitCode, fail

PRINTERS = {
    "executor": "python -m executor_svc",
    "scheduler": "python -m scheduler_svc",
    "gateway": "tandem gateway",
}
"""Command of each program that `tandem up` passes flags on to."""
_ASK = frozenset({"-h", "--help"})


def refuse_questions(given: Mapping[str, Sequence[str]]) -> None:
    """
    Refuse flags that make a program print something and end.

    Args:
        given: Flags that the user has passed on to each program, by its name.

    Raises:
        typer.Exit: There is one; the command that answers it was printed.
    """
    for program, flags in given.items():
        asked = next((flag for flag in flags if flag in _ASK), None)
        if asked is not None:
            raise _refusal(f"--{program}-arg={asked}", f"{PRINTERS[program]} --help")


def refuse_dry_runs(
    settings: Mapping[str, Mapping[str, Mapping[str, Any]]], flags: Mapping[str, Sequence[str]]
) -> None:
    """
    Refuse services whose settings say, by a flag or any other source, that they print and end.

    Args:
        settings: Settings of each service by their names, each with "value" and "source".
        flags: All flags that each service would get.

    Raises:
        typer.Exit: There is one; the command that prints it was printed.
    """
    for service, given in flags.items():
        asked = settings[service]["dry_run"]
        if asked["value"]:
            source = asked["source"]
            what = "--dry-run" if source == "flag" else f"dry_run (from {source})"
            rest = [flag for flag in given if flag != "--dry-run"]
            command = f"{PRINTERS[service]} {shlex.join([*rest, '--dry-run'])}"
            raise _refusal(f"{what} of the {service}", command)


def _refusal(what: str, command: str) -> typer.Exit:
    return fail(f"{what} prints and ends, and tandem up serves: use {command}", ExitCode.USAGE)
