"""Flags and variables of the services, as their --help tells them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache

PREFIXES = {"scheduler_svc": "TANDEM_", "executor_svc": "TANDEM_EXECUTOR_"}
"""Start of the variables of each service that has some; the rest is a flag's name in capitals."""


@cache
def help_of(module: str) -> str:
    """Return what a module prints for --help."""
    command = [sys.executable, "-m", module, "--help"]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout


def flags(module: str) -> set[str]:
    """Return the flags that a module knows."""
    return set(re.findall(r"--[a-z][a-z0-9-]*", help_of(module)))


def unknown_flags(module: str, arguments: list[str]) -> list[str]:
    """Return the flags among arguments that a module does not know."""
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    return [flag for flag in given if flag not in flags(module)]


def unknown_variables(module: str, names: list[str]) -> list[str]:
    """Return the variables with a service's prefix that stand for none of its flags."""
    prefix = PREFIXES[module]
    return [
        name
        for name in names
        if name.startswith(prefix)
        and "--" + name.removeprefix(prefix).lower().replace("_", "-") not in flags(module)
    ]
