"""Types what deploy/kubernetes/README.md says under "From nothing to a stream", line by line."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.deploy.cluster.cluster import Kubectl
from tests.deploy.kubernetes.manifests import KUBERNETES, ROOT

FIRST = "kubectl apply -f deploy/kubernetes/base/namespace.yaml"
FORWARD_LIMIT_S = 30.0


class CommandFailed(Exception):
    """A command of the page that failed, with what it printed."""


def commands(text: str) -> list[str]:
    """
    Return the commands of the page that lead to a stream.

    Args:
        text: The page, whose block of commands begins with `FIRST`.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if block.startswith(FIRST)]
    lines = [line.strip() for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class Walkthrough:
    """The commands of the page, and those of them that go on in the background."""

    def __init__(self, kubectl: Kubectl) -> None:
        """
        Args:
            kubectl: The cluster.
        """
        programs = str(Path(sys.executable).parent)
        path = kubectl.environment["PATH"]
        self._environment = kubectl.environment | {"PATH": f"{programs}:{path}"}
        self._background: list[subprocess.Popen[bytes]] = []

    def follow(self) -> None:
        """
        Run all commands.

        Raises:
            CommandFailed: One failed.
        """
        try:
            for command in commands((KUBERNETES / "README.md").read_text()):
                print(f"$ {command}", flush=True)
                if command.endswith("&"):
                    self._start(command.removesuffix("&").strip())
                else:
                    self._run(command)
        finally:
            for process in self._background:
                process.terminate()
                process.wait()

    def _run(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, flush=True)
        if done.returncode:
            raise CommandFailed(f"{command}: exit {done.returncode}: {done.stderr.strip()}")
        if done.stderr.strip():
            print(done.stderr, file=sys.stderr, flush=True)

    def _start(self, command: str) -> None:
        """Start a `port-forward` of the page, and wait until its port listens."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.DEVNULL,
        )
        self._background.append(process)
        port = int(command.rsplit(maxsplit=1)[-1])
        until = time.monotonic() + FORWARD_LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError as error:
                if process.poll() is not None or time.monotonic() > until:
                    raise CommandFailed(f"{command}: port {port} does not listen") from error
                time.sleep(0.2)
            else:
                return
