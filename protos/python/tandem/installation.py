"""The command that installs a part of the project which this Python lacks."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from pathlib import Path

PACKAGE = "tandem-serve"


def version() -> str:
    """Return the version that is installed; "unknown" where the source was only put on the path."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """
    Return the command for a shell that installs an extra for this interpreter.

    In a checkout that is the checkout itself: an index may have no such version, or none of ours.
    """
    checkout = Path(__file__).resolve().parents[3]
    pip = [sys.executable, "-m", "pip", "install"]
    if (checkout / "pyproject.toml").is_file():
        return shlex.join([*pip, "-e", f"{checkout}[{extra}]"])
    return shlex.join([*pip, f"{PACKAGE}[{extra}]"])
