"""
Builds the programs of a Kubernetes cluster from Go modules, once, into a cache outside the tree.

Modules come by `go` as it is configured on this machine. Custom resource definitions are the YAML
files that lie in the modules of the projects they belong to.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
KUBERNETES_VERSION = "v1.34.2"
"""The last minor version whose kubelet still takes control groups of version 1."""
LINKED = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}"


class BuildError(Exception):
    """A command of go that failed, with what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """
    A Go module of our own, which names what is built.

    Attributes:
        name: Name of the module, and of its folder in the cache.
        requires: Versions of the modules that it needs.
        programs: Packages to build, by name of the program; a path that ends in .go is a file of ours.
    """

    name: str
    requires: dict[str, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)


KUBERNETES = Source(
    name="kubernetes",
    requires={
        "k8s.io/kubernetes": KUBERNETES_VERSION,
        "go.etcd.io/etcd/server/v3": "v3.6.4",
    },
    programs={
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    },
)
COREDNS = Source(
    name="coredns",
    requires={"github.com/coredns/coredns": "v1.13.1"},
    programs={"coredns": "coredns.go"},
)
PAUSE = Source(name="pause", programs={"pause": "pause.go"})
POLICIES = Source(
    name="policies",
    requires={"sigs.k8s.io/kube-network-policies": "v0.8.0"},
    programs={"kube-network-policies": "sigs.k8s.io/kube-network-policies/cmd"},
)
SOURCES = (KUBERNETES, COREDNS, PAUSE, POLICIES)

DEFINITIONS = {
    "github.com/kedacore/keda/v2@v2.18.0": "config/crd/bases",
    "github.com/cert-manager/cert-manager@v1.19.1": "deploy/crds",
    "github.com/prometheus-operator/prometheus-operator@v0.92.1": "example/prometheus-operator-crd",
    "sigs.k8s.io/lws@v0.7.0": "config/crd/bases",
    "sigs.k8s.io/gateway-api-inference-extension@v1.4.0": "config/crd/bases",
}
"""Folder of the custom resource definitions in each module that has some."""


def run_go(*arguments: str, folder: Path) -> str:
    """
    Run a command of go, and return what it printed.

    Raises:
        BuildError: It failed.
    """
    done = subprocess.run(
        ["nice", "-n", "15", "go", *arguments],
        cwd=folder,
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        told = f"{done.stdout}\n{done.stderr}".strip()
        raise BuildError(f"go {' '.join(arguments)}: exit {done.returncode}: {told}")
    return done.stdout


def module_file(source: Source, kubernetes_mod: str) -> str:
    """
    Return the go.mod of a source.

    Kubernetes replaces its staging modules by folders that its module lacks. They are published too,
    with 0 in place of the major version 1.

    Args:
        source: What is built.
        kubernetes_mod: The go.mod of Kubernetes.
    """
    lines = [f"module {source.name}", "", "go 1.24.0", "godebug default=go1.24", ""]
    lines += [f"require {module} {version}" for module, version in source.requires.items()]
    if "k8s.io/kubernetes" in source.requires:
        version = KUBERNETES_VERSION.replace("v1.", "v0.", 1)
        staging = re.findall(r"^\s*(\S+) => \./staging/", kubernetes_mod, re.MULTILINE)
        lines += [f"replace {module} => {module} {version}" for module in staging]
    return "\n".join(lines) + "\n"


def build(cache: Path) -> Path:
    """
    Build all programs that the cache lacks.

    Args:
        cache: Folder outside the tree.

    Returns:
        Folder of the programs.

    Raises:
        BuildError: go failed.
    """
    programs = cache / f"programs-{KUBERNETES_VERSION}"
    programs.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        missing = [name for name in source.programs if not (programs / name).exists()]
        if not missing:
            continue
        folder = cache / f"module-{source.name}"
        folder.mkdir(exist_ok=True)
        told = ""
        if source is KUBERNETES:
            module = f"k8s.io/kubernetes@{KUBERNETES_VERSION}"
            downloaded = json.loads(run_go("mod", "download", "-json", module, folder=cache))
            told = Path(downloaded["GoMod"]).read_text()
        (folder / "go.mod").write_text(module_file(source, told))
        for name in missing:
            package = source.programs[name]
            if package.endswith(".go"):
                (folder / package).write_text((HERE / package).read_text())
            print(f"building {name}: minutes, the first time", flush=True)
            made = folder / name
            run_go(
                *("build", "-mod=mod", "-p=2", f"-ldflags={LINKED}", f"-o={made}", package),
                folder=folder,
            )
            made.replace(programs / name)
    return programs


def definitions(cache: Path) -> Iterator[Path]:
    """
    Yield the folders with the custom resource definitions of other projects.

    Raises:
        BuildError: go failed.
    """
    for module, below in DEFINITIONS.items():
        told = json.loads(run_go("mod", "download", "-json", module, folder=cache))
        yield Path(told["Dir"]) / below
