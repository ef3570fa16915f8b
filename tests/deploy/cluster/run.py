"""
Runs a Kubernetes cluster of one node on this machine, Tandem in it, and what happens to pods:
`python -m tests.deploy.cluster.run`. README.md says what it needs.

All processes, mounts and interfaces of the cluster are in namespaces of its own, which end with this
process, whatever ends it. Exit status: 0 only if all went well.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.deploy.cluster.node.build import BuildError, build, definitions
from tests.deploy.cluster.node.processes import remove_control_groups
from tests.deploy.cluster.policies import QUEUE

PACKAGES = {
    "go": "go",
    "kubectl": "kubectl",
    "podman": "podman",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Debian package, or the project's own name, of each program."""
GO_VERSION = (1, 24)
"""The oldest version that builds Kubernetes."""
BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
"""File of the kernel's module br_netfilter."""
QUEUES = (
    *("unshare", "--net", "iptables", "--table", "mangle", "--append", "FORWARD"),
    *("--match", "conntrack", "--ctstate", "NEW", "--jump", "NFQUEUE", "--queue-num", QUEUE),
)
"""Command that fails on a kernel without queues of packets; its rule ends with it."""
STOP_LIMIT_S = 60.0


def missing() -> list[str]:
    """Return what the machine lacks, in words."""
    found = [f"{name} ({package})" for name, package in PACKAGES.items() if not shutil.which(name)]
    if os.geteuid() != 0:
        return [*found, "the rights of root"]
    if shutil.which("go") and (version := go_version()) < GO_VERSION:
        wanted, present = (".".join(map(str, one)) for one in (GO_VERSION, version))
        found.append(f"go {wanted} or newer, in place of {present}")
    if not BRIDGED.exists():
        found.append("br_netfilter of the kernel (modprobe br_netfilter)")
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        found.append("overlayfs of the kernel (modprobe overlay)")
    if shutil.which("iptables") and shutil.which("unshare"):
        done = subprocess.run(QUEUES, capture_output=True, check=False)
        if done.returncode:
            found.append("NFQUEUE of the kernel (modprobe xt_NFQUEUE)")
    return found


def go_version() -> tuple[int, ...]:
    """Return the version of go by its first two numbers; (0, 0) if it tells none."""
    command = ["go", "env", "GOVERSION"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    return tuple(int(number) for number in found.groups()) if found else (0, 0)


def in_namespaces(*arguments: str) -> list[str]:
    """Return a command that runs this part in namespaces that end when this process ends."""
    return [
        *("setpriv", "--pdeathsig=KILL"),
        *("unshare", "--mount", "--pid", "--net", "--uts", "--ipc"),
        *("--fork", "--kill-child=KILL", "--mount-proc"),
        *(sys.executable, "-m", "tests.deploy.cluster.node.init", "tests.deploy.cluster.scenario"),
        *arguments,
    ]


def remove(state: Path) -> None:
    """Remove what no namespace holds: control groups and files of a cluster that has ended."""
    remove_control_groups()
    if state.exists():
        shutil.rmtree(state)


def run(chosen: argparse.Namespace) -> int:
    """Build what is missing, and run the cluster; return its exit status."""
    programs = build(chosen.cache)
    folders = [str(folder) for folder in definitions(chosen.cache)]
    state = chosen.cache / "state"
    remove(state)  # of one that was killed
    state.mkdir()
    process = subprocess.Popen(
        in_namespaces(
            *(f"--programs={programs}", f"--state={state}"),
            *(f"--images={chosen.cache / 'images'}", f"--streams={chosen.streams}"),
            *("--only", *chosen.only),
            *("--definitions", *folders),
        )
    )
    try:
        return process.wait()
    except KeyboardInterrupt:  # the cluster has it from the terminal as well
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        raise
    finally:
        process.kill()
        process.wait()
        remove(state)


def main() -> int:
    """Run what was asked for, one cluster at a time."""
    parser = argparse.ArgumentParser(description="Run Tandem in a Kubernetes cluster of one node.")
    parser.add_argument("--streams", type=int, default=16, help="streams at a time (default: 16)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="events with one of these texts; writes the table of connections alone",
    )
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument(
        "--cache",
        type=Path,
        default=home / "tandem-cluster",
        help="folder for programs and images, which stay (default: %(default)s)",
    )
    chosen = parser.parse_args()
    if lacking := missing():
        print(f"cluster: missing: {', '.join(lacking)}; README.md has the list", file=sys.stderr)
        return 75
    chosen.cache = chosen.cache.resolve()
    chosen.cache.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (chosen.cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return run(chosen)
        except BlockingIOError:
            print("cluster: another one runs with this cache", file=sys.stderr)
        except BuildError as error:
            print(f"cluster: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
