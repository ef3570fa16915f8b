"""Commands of podman, on a machine that may have no systemd and few privileges."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SETTINGS = """\
[containers]
# Where this process may not raise limits, podman's own are refused.
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
log_driver = "k8s-file"
[network]
network_backend = "netavark"
[engine]
# runc runs with hybrid control groups, which crun refuses; neither needs systemd then.
runtime = "runc"
events_logger = "file"
cgroup_manager = "cgroupfs"
"""
NUM_LOG_LINES = 20


class PodmanError(Exception):
    """A command of podman that failed, with what it printed."""


class PodmanCommands:
    """
    Commands of podman with settings of their own.

    Attributes:
        environment: Variables under which podman has these settings.
    """

    def __init__(self, folder: Path) -> None:
        """
        Write the settings.

        Args:
            folder: Folder for the settings.
        """
        self._folder = folder
        settings = folder / "containers.conf"
        settings.write_text(SETTINGS)
        self.environment = os.environ | {"CONTAINERS_CONF": str(settings)}

    def __call__(self, *arguments: str) -> str:
        """
        Run a command to its end, and return what it printed.

        Raises:
            PodmanError: It failed.
        """
        done = self._run(*arguments)
        if done.returncode:
            told = f"{done.stdout}\n{done.stderr}".strip()
            raise PodmanError(f"podman {' '.join(arguments)}: exit {done.returncode}: {told}")
        return done.stdout.strip()

    def attempt(self, *arguments: str) -> bool:
        """Run a command that may fail, such as the removal of what may not be there."""
        return self._run(*arguments).returncode == 0

    def last_lines(self, container: str) -> str:
        """Return the last lines that a container printed; why there are none, if it is not there."""
        done = self._run("logs", f"--tail={NUM_LOG_LINES}", container)
        return done.stdout + done.stderr

    def log(self, container: str, since_s: float) -> str:
        """Return what a container printed since a Unix time; nothing, if it is not there."""
        done = self._run("logs", f"--since={int(since_s)}", container)
        return "" if done.returncode else done.stdout + done.stderr

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman", *arguments],
            cwd=self._folder,  # a container's monitor leaves a file where it was started
            env=self.environment,
            start_new_session=True,  # Ctrl-C is the harness's, which then removes what there is
            capture_output=True,
            text=True,
            check=False,
        )
