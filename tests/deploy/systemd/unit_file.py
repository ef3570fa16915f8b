"""Unit files of systemd, as far as ours need it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UNITS = {path.stem: path for path in sorted((ROOT / "deploy/systemd").glob("*.service"))}
SECONDS = re.compile(r"(\d+)s?")


class Unit:
    """The lines of a unit by their keys; a key may have several."""

    def __init__(self, path: Path) -> None:
        """Read a file."""
        self.values: dict[str, list[str]] = {}
        for line in path.read_text().splitlines():
            key, separator, text = line.partition("=")
            if separator and not line.startswith("#"):
                self.values.setdefault(key, []).append(text)

    def one(self, key: str) -> str:
        """Return the value of a key that has one."""
        (value,) = self.values[key]
        return value

    def environment(self) -> dict[str, str]:
        """Return the variables that the unit sets."""
        return dict(text.split("=", 1) for text in self.values.get("Environment", []))

    def command(self, environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the words of ExecStart, with the variables in it replaced."""
        known = self.environment() if environment is None else environment
        line = re.sub(r"\$\{(\w+)\}", lambda name: known[name[1]], self.one("ExecStart"))
        return shlex.split(line)

    def module(self) -> str:
        """Return the Python module that the unit runs."""
        _python, minus_m, module, *_ = self.command()
        assert minus_m == "-m"
        return module

    def stop_timeout_s(self) -> float:
        """Return the seconds from SIGTERM to SIGKILL."""
        found = SECONDS.fullmatch(self.one("TimeoutStopSec"))
        assert found is not None
        return float(found[1])
