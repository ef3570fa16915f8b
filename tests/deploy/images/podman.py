"""Containers of podman, on a machine that may have no systemd and few privileges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.deploy.podman import PodmanCommands

HARDENED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
"""Options of every container here; the image itself says which user it is run by."""


def missing_programs(*names: str) -> list[str]:
    """Return which of the programs are not on the PATH."""
    return [name for name in names if shutil.which(name) is None]


class Podman(PodmanCommands):
    """Containers, networks, volumes and secrets of one run, all of which `clean` removes."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """
        Write the settings.

        Args:
            folder: Folder for the settings.
            prefix: Start of the names of all that is made.
        """
        super().__init__(folder)
        self._prefix = prefix
        self._made: list[tuple[str, str]] = []

    def name(self, short: str) -> str:
        """Return the name in podman of what has a short name in this run."""
        return f"{self._prefix}-{short}"

    def make(self, kind: str, short: str, *arguments: str) -> str:
        """Make a network, a volume or a secret, and return its name."""
        name = self.name(short)
        self(kind, "create", *arguments[:-1], name, *arguments[-1:])
        self._made.append((kind, name))
        return name

    def start(self, short: str, image: str, options: Sequence[str], command: Sequence[str]) -> None:
        """Start a hardened container."""
        name = self.name(short)
        self._made.append(("container", name))
        self("run", "--detach", f"--name={name}", *HARDENED, *options, image, *command)

    def remove(self, short: str) -> None:
        """Remove a container that has ended."""
        self("rm", self.name(short))
        self._made.remove(("container", self.name(short)))

    def once(self, image: str, *command: str, entrypoint: str) -> str:
        """Run a command in a hardened container of its own, and return what it printed."""
        return self(
            *("run", "--rm", "--network=none", *HARDENED),
            *(f"--entrypoint={entrypoint}", image, *command),
        )

    def inside(self, short: str, *command: str) -> str:
        """Run a command in a container, and return what it printed."""
        return self("exec", self.name(short), *command)

    def address(self, short: str, network: str) -> str:
        """Return a container's address in a network."""
        networks = self.inspect(short)["NetworkSettings"]["Networks"]
        return str(networks[network]["IPAddress"])

    def inspect(self, short: str) -> Mapping[str, Mapping]:
        """Return what podman knows of a container."""
        return json.loads(self("inspect", self.name(short)))[0]

    def processes(self, short: str) -> list[psutil.Process]:
        """Return the processes of a container."""
        first = psutil.Process(self.inspect(short)["State"]["Pid"])
        return [first, *first.children(recursive=True)]

    def logs(self, short: str) -> str:
        """Return the last lines that a container printed."""
        return self.last_lines(self.name(short))

    def clean(self) -> None:
        """Remove all that was made, the latest first."""
        for kind, name in reversed(self._made):
            flags = ("-f", "-t0") if kind == "container" else ()
            self.attempt(kind, "rm", *flags, name)
        self._made.clear()
