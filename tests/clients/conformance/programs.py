"""The programs that play callers of each client, and how each is started."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "deploy/local/clients"
"""Command that builds the programs of languages that need it."""


@dataclass(frozen=True, slots=True)
class Program:
    """
    One program.

    Attributes:
        name: Column of the table of results.
        command: Command that starts it, in the root of the project.
        language: Its name for `deploy/local/clients`; None = it is not built.
    """

    name: str
    command: tuple[str, ...]
    language: str | None = None


def _built(language: str) -> Program:
    return Program(language, (str(BUILD), "run", language), language)


_PYTHON = (sys.executable, "-m", "tandem_conformance")

PROGRAMS = (
    Program("python", _PYTHON),
    Program("python asyncio", (*_PYTHON, "--loop")),
    _built("go"),
    _built("typescript"),
    _built("java"),
    _built("cpp"),
    _built("rust"),
)


def why_not(program: Program) -> str:
    """Return why a program cannot run here; empty if it can."""
    if program.language is None:
        return ""
    command = [str(BUILD), "check", program.language]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip() or done.stderr.strip()) if done.returncode else ""
