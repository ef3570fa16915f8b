"""Pods of podman in a network of their own, all of which `close` removes."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.deploy.podman import PodmanCommands, PodmanError
from tests.deploy.pods.translate import LocalPod
from tests.waiting import TooLate, wait_until

STOP_LIMIT_S = 20.0
"""Longest time that podman may take to stop a pod after its last container."""
HOG = """
from pathlib import Path
Path("/proc/1/oom_score_adj").write_text("1000")
kept = []
while True:
    kept.append(b"x" * (16 << 20))
"""
"""Program that takes memory without end where the container's first process is killed first for it."""


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
        self._addresses: dict[str, str] = {}
        """Fixed addresses, by the name of their pod."""
        self._earlier: dict[str, str] = {}
        """Logs of pods that were removed, by name."""
        self._since_s = time.time()
        self._podman = PodmanCommands(folder)
        self._podman("network", "create", network)
        (found,) = json.loads(self._podman("network", "inspect", network))
        self._subnet = ipaddress.ip_network(found["subnets"][0]["subnet"])

    def play(self, pod: LocalPod, *, has_fixed_address: bool = False) -> None:
        """
        Start a pod under the names of its Services; an earlier one of its name is removed.

        Args:
            pod: The pod.
            has_fixed_address: True for a pod whose successors have its address, as behind a Service.
        """
        self.remove(pod)
        manifest = self._folder / f"{pod.name}.yaml"
        manifest.write_text(yaml.safe_dump(pod.document))
        names = ",".join(f"alias={alias}" for alias in (*pod.aliases, pod.name))
        self._played[pod.name] = pod
        where = ["--network", f"{self._network}:{names}"]
        if has_fixed_address:
            last = self._subnet.broadcast_address - 1 - len(self._addresses)
            where += ["--ip", self._addresses.setdefault(pod.name, str(last))]
        self._podman("kube", "play", "--quiet", *where, str(manifest))

    def containers(self, pod: LocalPod) -> Sequence[str]:
        """Return the names of a pod's containers, without those that run before the others."""
        return [f"{pod.name}-{one['name']}" for one in pod.document["spec"]["containers"]]

    def kill(self, pod: LocalPod) -> None:
        """Kill a pod's containers as a lack of memory does."""
        for container in self.containers(pod):
            self._podman("kill", "--signal", "KILL", container)

    def stop(self, pod: LocalPod) -> None:
        """
        Send SIGTERM, and SIGKILL after the pod's grace time. Its containers are stopped, not the pod,
        whose network podman would take away at once: a kubelet leaves it until they have ended.
        """
        for container in self.containers(pod):
            self._podman("stop", "--time", str(pod.grace_s - pod.pre_stop_s), container)

    def pause(self, pod: LocalPod) -> None:
        """Let a pod's processes stand still."""
        for container in self.containers(pod):
            self._podman("pause", container)

    def unpause(self, pod: LocalPod) -> None:
        """Let the processes of a paused pod run again."""
        for container in self.containers(pod):
            self._podman("unpause", container)

    def cut_off(self, pod: LocalPod) -> None:
        """Drop all packets to and from a pod: its link to the network's bridge goes down."""
        self._set_link(pod, "down")

    def join(self, pod: LocalPod) -> None:
        """Connect a pod that was cut off to the network again."""
        self._set_link(pod, "up")

    def fill_memory(self, pod: LocalPod) -> None:
        """
        Take memory in a pod's first container until the kernel kills the service there for its limit;
        what takes it ends with the container.

        Raises:
            PodmanError: The container runs on.
        """
        container = self.containers(pod)[0]
        # The command fails where it works, as it ends with the container.
        self._podman.attempt("exec", "--user=0", "--privileged", container, "python3", "-c", HOG)
        try:
            wait_until(lambda: self._has_ended(container), container, STOP_LIMIT_S, 0.2)
        except TooLate as error:
            raise PodmanError(f"{container} runs on without memory: {error}") from error

    def restart(self, pod: LocalPod) -> None:
        """
        Start a pod whose containers have ended again; its volumes stay. podman stops what is left
        of such a pod a moment after its last container, so that is waited for.
        """
        try:
            wait_until(lambda: not self._is_running(pod), pod.name, STOP_LIMIT_S, 0.2)
        except TooLate as error:
            raise PodmanError(f"the containers of {pod.name} do not end: {error}") from error
        self._podman("pod", "start", pod.name)

    def remove(self, pod: LocalPod) -> None:
        """Remove a pod and its scratch space, if it is there; its log is kept."""
        if pod.name in self._played:
            self._earlier[pod.name] = self._earlier.get(pod.name, "") + self._log(pod)
        self._podman("pod", "rm", "--force", "--ignore", "--time", "0", pod.name)
        for volume in pod.document["spec"]["volumes"]:
            if "emptyDir" in volume:
                self._podman("volume", "rm", "--force", volume["name"])

    def address(self, pod: LocalPod) -> str:
        """Return a pod's address in the network."""
        inspected = json.loads(self._podman("inspect", self.containers(pod)[0]))[0]
        infra = json.loads(self._podman("pod", "inspect", inspected["Pod"]))["InfraContainerID"]
        networks = json.loads(self._podman("inspect", infra))[0]["NetworkSettings"]["Networks"]
        return str(networks[self._network]["IPAddress"])

    def _is_running(self, pod: LocalPod) -> bool:
        inspected = json.loads(self._podman("pod", "inspect", pod.name))
        return any(one["State"] == "running" for one in inspected["Containers"])

    def _has_ended(self, container: str) -> bool:
        state = json.loads(self._podman("inspect", container))[0]["State"]
        return bool(state["OOMKilled"]) or state["Status"] in ("exited", "stopped")

    def _set_link(self, pod: LocalPod, state: str) -> None:
        pid = str(json.loads(self._podman("inspect", self.containers(pod)[0]))[0]["State"]["Pid"])
        inside = ["nsenter", "--target", pid, "--net", "ip", "-oneline", "link", "show", "eth0"]
        # "2: eth0@if17: ...": the other end of the cable has the number 17 outside.
        number = _output(inside).split("@if")[1].split(":")[0]
        ends = _output(["ip", "-oneline", "link"]).splitlines()
        (outside,) = [end.split()[1].split("@")[0] for end in ends if end.startswith(f"{number}:")]
        _output(["ip", "link", "set", outside, state])

    def logs(self, pod: LocalPod) -> str:
        """Return the last lines of a pod's containers."""
        names = self.containers(pod)
        return "\n".join(f"{one}:\n{self._podman.last_lines(one)}" for one in names)

    def forget_logs(self) -> None:
        """Let `lines_with` begin here."""
        self._earlier.clear()
        self._since_s = time.time()

    def lines_with(self, pod: LocalPod, texts: Sequence[str]) -> list[str]:
        """
        Return the lines of a pod's log, and of pods of its name before it, that have one of some
        texts, since `forget_logs`.
        """
        log = self._earlier.get(pod.name, "") + self._log(pod)
        return [line for line in log.splitlines() if any(text in line for text in texts)]

    def _log(self, pod: LocalPod) -> str:
        return "".join(self._podman.log(one, self._since_s) for one in self.containers(pod))

    def close(self) -> None:
        """
        Remove all pods, and the network.

        Raises:
            PodmanError: Something is left, after all else was removed.
        """
        left = []
        for pod in self._played.values():
            try:
                self.remove(pod)
            except PodmanError as error:
                left.append(str(error))
        if not self._podman.attempt("network", "rm", "--force", self._network):
            left.append(f"the network {self._network}")
        if left:
            raise PodmanError(f"not removed: {'; '.join(left)}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
