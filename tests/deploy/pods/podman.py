"""Pods of podman in a network of their own, all of which `close` removes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.deploy.pods.translate import LocalPod, Translation

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


class PodmanError(Exception):
    """A command of podman that failed, with what it printed."""


class Pods:
    """Pods of one translation. Owned by the harness, which calls `close`."""

    def __init__(self, folder: Path, network: str) -> None:
        """
        Make the network.

        Args:
            folder: Folder for settings, manifests and files of Secrets.
            network: Name of the network, which no other run uses.
        """
        self._folder = folder
        self._network = network
        self._played: dict[str, LocalPod] = {}
        settings = folder / "containers.conf"
        settings.write_text(SETTINGS)
        self._environment = os.environ | {"CONTAINERS_CONF": str(settings)}
        self("network", "create", network)

    def __call__(self, *arguments: str) -> str:
        """
        Run a command of podman to its end, and return what it printed.

        Raises:
            PodmanError: It failed.
        """
        done = subprocess.run(
            ["podman", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PodmanError(f"podman {' '.join(arguments)}: {done.stdout}{done.stderr}".strip())
        return done.stdout.strip()

    @staticmethod
    def write_files(translation: Translation, folder: Path) -> None:
        """Write the files of Secrets; the pods' user may read them."""
        for path, content in translation.files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.parent.chmod(0o755)
            file.write_bytes(content)
            file.chmod(0o644)

    def play(self, pod: LocalPod) -> None:
        """Start a pod under the names of its Services; an earlier one of its name is removed."""
        self.remove(pod)
        manifest = self._folder / f"{pod.name}.yaml"
        manifest.write_text(yaml.safe_dump(pod.document))
        names = ",".join(f"alias={alias}" for alias in (*pod.aliases, pod.name))
        self._played[pod.name] = pod
        self("kube", "play", "--quiet", "--network", f"{self._network}:{names}", str(manifest))

    def containers(self, pod: LocalPod) -> Sequence[str]:
        """Return the names of a pod's containers, without those that run before the others."""
        return [f"{pod.name}-{one['name']}" for one in pod.document["spec"]["containers"]]

    def kill(self, pod: LocalPod) -> None:
        """Kill a pod's containers as a lack of memory does."""
        for container in self.containers(pod):
            self("kill", "--signal", "KILL", container)

    def stop(self, pod: LocalPod) -> None:
        """Send SIGTERM, and SIGKILL after the pod's grace time."""
        self("pod", "stop", "--time", str(pod.grace_s - pod.pre_stop_s), pod.name)

    def pause(self, pod: LocalPod) -> None:
        """Let a pod's processes stand still."""
        for container in self.containers(pod):
            self("pause", container)

    def unpause(self, pod: LocalPod) -> None:
        """Let them go on."""
        for container in self.containers(pod):
            self("unpause", container)

    def restart(self, pod: LocalPod) -> None:
        """Start the containers of a pod again, as a kubelet does: its volumes and address stay."""
        for container in self.containers(pod):
            self("start", container)

    def remove(self, pod: LocalPod) -> None:
        """Remove a pod and its scratch space, if it is there."""
        self("pod", "rm", "--force", "--ignore", "--time", "0", pod.name)
        for volume in pod.document["spec"]["volumes"]:
            if "emptyDir" in volume:
                self("volume", "rm", "--force", volume["name"])

    def address(self, pod: LocalPod) -> str:
        """Return a pod's address in the network."""
        inspected = json.loads(self("inspect", self.containers(pod)[0]))[0]
        infra = json.loads(self("pod", "inspect", inspected["Pod"]))["InfraContainerID"]
        networks = json.loads(self("inspect", infra))[0]["NetworkSettings"]["Networks"]
        return str(networks[self._network]["IPAddress"])

    def logs(self, pod: LocalPod) -> str:
        """Return the last lines of a pod's containers."""
        lines = []
        for container in self.containers(pod):
            done = subprocess.run(
                ["podman", "logs", "--tail", "20", container],
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
            )
            lines.append(f"{container}:\n{done.stdout}{done.stderr}")
        return "\n".join(lines)

    def close(self) -> None:
        """Remove all pods, and the network."""
        for pod in self._played.values():
            self.remove(pod)
        self("network", "rm", "--force", self._network)
