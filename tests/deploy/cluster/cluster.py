"""Tandem in a cluster that runs: what `kubectl` says of it, and how it is waited for."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.cluster.node.images import Runtime
from tests.deploy.cluster.node.settings import DOMAIN
from tests.deploy.events.event import num_attached
from tests.waiting import wait_until

NAMESPACE = "tandem"
HOST = f"tandem-scheduler.{NAMESPACE}.svc.{DOMAIN}"
"""The name of the scheduler's Service, which clients on the node look up in the cluster."""
EXECUTORS = "statefulset/tandem-executor"
SCHEDULER = "deployment/tandem-scheduler"
LIMIT_S = 400.0
LOOK_S = 0.5
"""Seconds between two looks at the cluster."""


class KubectlError(Exception):
    """A command of kubectl that failed, with what it printed."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """
    Commands of kubectl to one cluster.

    Attributes:
        environment: Variables under which kubectl reaches the cluster.
    """

    environment: dict[str, str]

    @classmethod
    def of(cls, kubeconfig: Path) -> Kubectl:
        """Return commands as the user of a file."""
        return cls(os.environ | {"KUBECONFIG": str(kubeconfig)})

    def __call__(self, *arguments: str, content: str | None = None) -> str:
        """
        Run a command to its end, and return what it printed.

        Args:
            arguments: Arguments of kubectl.
            content: Text for its standard input.

        Raises:
            KubectlError: It failed.
        """
        done = subprocess.run(
            ["kubectl", *arguments],
            env=self.environment,
            input=content,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            told = f"{done.stdout}\n{done.stderr}".strip()
            raise KubectlError(f"kubectl {' '.join(arguments)}: exit {done.returncode}: {told}")
        return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Cluster:
    """
    Scheduler and executors, as pods of a node.

    Attributes:
        kubectl: Commands of an administrator.
        runtime: Containers of the node.
    """

    kubectl: Kubectl
    runtime: Runtime

    def in_namespace(self, *arguments: str, content: str | None = None) -> str:
        """Run a command of kubectl in the namespace, and return what it printed."""
        return self.kubectl("--namespace", NAMESPACE, *arguments, content=content)

    def found(self, *what: str) -> dict[str, Any]:
        """Return an object, or a list of objects, of the namespace."""
        content: dict[str, Any] = json.loads(self.in_namespace("get", *what, "--output=json"))
        return content

    def scheduler_pod(self) -> str:
        """Return the name of the scheduler's pod."""
        label = "--selector=app.kubernetes.io/name=tandem-scheduler"
        return str(self.found("pods", label)["items"][0]["metadata"]["name"])

    def container(self, pod: str) -> str:
        """Return the id of the container of a pod that runs."""
        status = self.found("pod", pod)["status"]["containerStatuses"][0]
        return str(status["containerID"]).rpartition("/")[2]

    def num_restarts(self, pod: str) -> int:
        """Return how often the kubelet has started a pod's container again."""
        return int(self.found("pod", pod)["status"]["containerStatuses"][0]["restartCount"])

    def wait_for_restart(self, pod: str, num_restarts: int) -> None:
        """
        Wait until the kubelet has started a pod's container more than a number of times again.

        Raises:
            TooLate: It does not within `LIMIT_S`.
        """
        wait_until(
            lambda: self.num_restarts(pod) > num_restarts,
            f"the container of {pod} started again",
            LIMIT_S,
            LOOK_S,
        )

    def wait_for(self, num_executors: int) -> None:
        """
        Wait until both rollouts are complete, and the scheduler has a number of executors.

        Raises:
            KubectlError: A rollout does not end.
            TooLate: Executors are not attached within `LIMIT_S`.
        """
        for what in (EXECUTORS, SCHEDULER):
            self.in_namespace("rollout", "status", what, f"--timeout={LIMIT_S:g}s")

        def are_attached() -> bool:
            try:
                return num_attached(HOST) == num_executors
            except OSError:  # no scheduler is behind the Service yet
                return False

        wait_until(are_attached, f"{num_executors} executors attached", LIMIT_S, LOOK_S)

    def diagnostics(self) -> str:
        """Return pods, events and the ends of logs, for a run that fails."""
        parts = []
        for arguments in (
            ("get", "pods", "--output=wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", SCHEDULER, "--tail=15"),
            ("logs", EXECUTORS, "--tail=15", "--all-containers"),
        ):
            try:
                parts.append(self.in_namespace(*arguments))
            except KubectlError as error:
                parts.append(str(error))
        return "\n\n".join(parts)
