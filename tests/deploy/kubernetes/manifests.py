"""
Renders deploy/kubernetes with `kubectl kustomize`: the base, each overlay, and each component on top
of the overlay that it is made for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy/kubernetes"

Document = dict[str, Any]

COMBINATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu, network-policies": ("cpu", ("network-policies",)),
    "cpu, monitoring": ("cpu", ("monitoring",)),
    "cpu, autoscaling-keda": ("cpu", ("open-ports", "autoscaling-keda")),
    "cpu, autoscaling-hpa": ("cpu", ("autoscaling-hpa",)),
    "cpu, gateway": ("cpu", ("gateway",)),
    "cpu, inference-pool": ("cpu", ("inference-pool", "network-policies")),
    "cpu, tokens": ("cpu", ("tokens",)),
    "cpu, tls": ("cpu", ("tls",)),
    "gpu, tensor-parallel": ("gpu", ("tensor-parallel",)),
    "gpu, tensor-parallel, tls": ("gpu", ("tensor-parallel", "network-policies", "tls")),
    "gpu, all of one cluster": (
        "gpu",
        (
            *("gateway", "network-policies", "monitoring", "autoscaling-keda", "tokens"),
            *("tls", "autoscaling-keda-tls"),
        ),
    ),
    "local-podman, tls": ("local-podman", ("tls",)),
}
"""Overlay and components of each combination that is rendered, by name."""


class KubectlMissing(Exception):
    """There is no kubectl that renders components."""


class RenderingError(ValueError):
    """A folder that kubectl refuses to render, with what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """
    A template of pods in a rendering.

    Attributes:
        where: Rendering, kind and name, for messages.
        labels: Labels that its pods have.
        spec: The pod's specification.
    """

    where: str
    labels: dict[str, str]
    spec: Document

    @property
    def containers(self) -> list[Document]:
        """Its containers, those that run before the others too."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def overlays() -> list[str]:
    """Return the names of all overlays."""
    return sorted(path.name for path in (KUBERNETES / "overlays").iterdir())


def components() -> list[str]:
    """Return the names of all components."""
    return sorted(path.name for path in (KUBERNETES / "components").iterdir())


def render(folder: Path) -> list[Document]:
    """
    Return the documents of a folder with a kustomization.

    Raises:
        KubectlMissing: There is no kubectl.
        RenderingError: kubectl refuses the folder.
    """
    if shutil.which("kubectl") is None:
        raise KubectlMissing(
            "kubectl is missing: install version 1.27 or newer, it needs no cluster"
        )
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RenderingError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


@contextmanager
def combination(overlay: str, names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder whose kustomization names an overlay and components, as a user's own does."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        base = os.path.relpath(KUBERNETES.resolve(), folder)
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{base}/overlays/{overlay}"],
            "components": [f"{base}/components/{name}" for name in names],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        yield folder


def render_combination(overlay: str, names: tuple[str, ...]) -> list[Document]:
    """Return the documents of an overlay with components."""
    with combination(overlay, names) as folder:
        return render(folder)


def render_all() -> dict[str, list[Document]]:
    """Return the documents of base, overlays and combinations, by name."""
    rendered = {"base": render(KUBERNETES / "base")}
    rendered |= {name: render(KUBERNETES / "overlays" / name) for name in overlays()}
    for name, (overlay, chosen) in COMBINATIONS.items():
        rendered[name] = render_combination(overlay, chosen)
    return rendered


def pods(rendering: str, documents: list[Document]) -> Iterator[Pod]:
    """Yield the templates of pods among documents."""
    for document in documents:
        where = f"{rendering}: {document['kind']} {document['metadata']['name']}"
        spec = document.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        parts = {"": spec.get("template"), " leader": group.get("leaderTemplate")}
        parts[" worker"] = group.get("workerTemplate")
        for part, template in parts.items():
            if template is None:
                continue
            labels = dict(template["metadata"]["labels"])
            if part:  # the controller sets it
                index = "0" if part == " leader" else "1"
                labels["leaderworkerset.sigs.k8s.io/worker-index"] = index
            yield Pod(where=where + part, labels=labels, spec=template["spec"])
