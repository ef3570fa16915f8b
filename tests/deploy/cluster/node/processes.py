"""One node of a cluster, and its control plane: namespaces, network, processes."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.deploy.cluster.node import settings
from tests.deploy.cluster.node.certificates import SERVER, Authority
from tests.deploy.cluster.node.images import COREDNS, PAUSE, POLICIES, TANDEM, Runtime

CONTROL_GROUPS = Path("/sys/fs/cgroup")
START_LIMIT_S = 180.0
STOP_LIMIT_S = 10.0
NUM_LOG_LINES = 15
USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
    "kubelet": (f"system:node:{settings.NODE}", "system:nodes"),
    "proxy": ("system:kube-proxy", None),
}
"""Name and group of each component, as the roles of Kubernetes know them."""


class NodeError(Exception):
    """A component that does not start, with the end of its log."""


def run(*command: str) -> None:
    """
    Run a command to its end.

    Raises:
        NodeError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodeError(f"{' '.join(command)}: {done.stderr.strip()}")


def control_groups() -> list[Path]:
    """Return the group of this cluster's pods in each hierarchy of the kernel."""
    if (CONTROL_GROUPS / "cgroup.controllers").exists():
        return [CONTROL_GROUPS / settings.CGROUP]
    roots = [path for path in CONTROL_GROUPS.iterdir() if path.is_dir() and not path.is_symlink()]
    return [root / settings.CGROUP for root in roots]


def make_control_groups() -> None:
    """Make the groups below which the kubelet makes those of pods."""
    for group in control_groups():
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # processes run nowhere until these are set
            if (group / name).exists():
                (group / name).write_text((group.parent / name).read_text())


def remove_control_groups() -> None:
    """Remove the groups of this cluster, whose processes have ended."""
    for group in control_groups():
        if not group.exists():
            continue
        until = time.monotonic() + STOP_LIMIT_S
        below = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        for path in [*below, group]:
            while path.exists():
                try:
                    path.rmdir()
                except OSError:  # the kernel still ends its processes
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.1)


def enter_network() -> None:
    """Give this process's empty network namespace an address, and make it forward."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "nowhere")
    run("ip", "address", "add", f"{settings.NODE_ADDRESS}/24", "dev", "node0")
    for link in ("node0", "nowhere"):
        run("ip", "link", "set", link, "up")
    # Addresses of Services need a route before they are translated.
    run("ip", "route", "add", "default", "via", settings.GATEWAY_ADDRESS, "dev", "node0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")


def enter_mounts() -> None:
    """Cover the machine's folders that a runtime writes to, in this process's mount namespace."""
    run("mount", "--make-rshared", "/")  # pods see what the kubelet mounts
    for folder in ("/run/containerd", "/var/lib/cni"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "none", folder)


class Node:
    """
    The processes of a cluster of one node.

    Attributes:
        runtime: Images and containers of the node.
        kubeconfig: File with which an administrator calls the API server.
    """

    def __init__(self, programs: Path, state: Path, images: Path) -> None:
        """
        Write certificates and configuration.

        Args:
            programs: Folder of the programs that `build` made.
            state: Empty folder for all that lives as long as the cluster.
            images: Folder of containerd's images, which outlives the cluster.
        """
        self._programs = programs
        self._state = state
        self._running: list[subprocess.Popen[bytes]] = []
        pki = state / "pki"
        pki.mkdir()
        authority = Authority(pki)
        kubernetes = "kubernetes.default.svc"
        authority.issue(
            *("api-server", "kubernetes"),
            hosts=("localhost", "kubernetes", kubernetes, f"{kubernetes}.{settings.DOMAIN}"),
            addresses=("127.0.0.1", settings.NODE_ADDRESS, settings.API_ADDRESS),
        )
        for file, (name, group) in USERS.items():
            authority.kubeconfig(file, name, group)
        settings.write(state, images)
        self.kubeconfig = pki / "admin.kubeconfig"
        self.runtime = Runtime(state / "containerd.sock", images.with_name("images-had"))

    def start(self) -> None:
        """
        Start control plane and node, and wait until they serve.

        Raises:
            NodeError: A component does not start.
            ImageError: An image is missing.
        """
        enter_mounts()
        enter_network()
        make_control_groups()
        state = self._state
        runtime = self._start("containerd", f"--config={state}/containerd.toml")
        self._start("etcd", *settings.etcd(state))
        server = self._start("kube-apiserver", *settings.api_server(state))
        self._wait_for_file(state / "containerd.sock", runtime)
        self.runtime.add_program(PAUSE, self._programs / "pause")
        self.runtime.add_program(COREDNS, self._programs / "coredns")
        self.runtime.add_program(POLICIES, self._programs / "kube-network-policies")
        for image in TANDEM:
            self.runtime.add_from_podman(image)
        self._wait_for_server(server)
        self._start("kube-controller-manager", *settings.controller_manager(state))
        self._start("kube-scheduler", *settings.scheduler(state))
        self._start("kubelet", *settings.kubelet_flags(state))
        self._start("kube-proxy", *settings.proxy_flags(state))

    def stop(self) -> None:
        """End all processes that `start` has started; those of pods end with their namespace."""
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """
        Check that every component still runs.

        Raises:
            NodeError: One has ended.
        """
        for process in self._running:
            if process.poll() is not None:
                raise NodeError(self._ended(process))

    def _start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        program = self._programs / name
        command = str(program) if program.exists() else shutil.which(name)
        if command is None:
            raise NodeError(f"{name} is missing; README.md has the packages")
        with (self._state / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([command, *flags], stdout=log, stderr=log)
        self._running.append(process)
        return process

    def _wait_for_file(self, file: Path, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_LIMIT_S
        while not file.exists():
            self._still(process, until)

    def _wait_for_server(self, process: subprocess.Popen[bytes]) -> None:
        trusting = ssl.create_default_context(cafile=str(self._state / "pki/ca.crt"))
        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"{SERVER}/readyz", context=trusting, timeout=5):
                    return
            except OSError:  # it does not listen yet, or says that it is not ready
                self._still(process, until)

    def _still(self, process: subprocess.Popen[bytes], until: float) -> None:
        if process.poll() is not None or time.monotonic() > until:
            raise NodeError(self._ended(process))
        time.sleep(0.2)

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        command = process.args
        name = Path(command[0] if isinstance(command, list) else "").name
        log = (self._state / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join([f"{name} does not run:", *log[-NUM_LOG_LINES:]])
