"""Asks the API server whether it takes all that deploy/kubernetes renders to, without keeping it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import yaml

from tests.deploy.cluster.cluster import NAMESPACE, Kubectl, KubectlError
from tests.deploy.kubernetes.manifests import KUBERNETES, Document, Pod, pods, render_all

CRITICAL = {"PriorityClass"}
"""Kinds that pods name, and that the API server looks up."""


def with_unknown_field(document: Document) -> Document:
    """Return a copy of a document with a field that its kind does not have."""
    changed = copy.deepcopy(document)
    changed["spec"]["noSuchField"] = 1
    return changed


def pod_of(pod: Pod) -> Document:
    """Return a pod of a template, as a controller creates it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "template-", "namespace": NAMESPACE, "labels": pod.labels},
        "spec": pod.spec,
    }


def privileged(pod: Document) -> Document:
    """Return a copy of a pod that a namespace of the standard `restricted` has to refuse."""
    changed = copy.deepcopy(pod)
    for container in changed["spec"]["containers"]:
        container["securityContext"] = {"privileged": True}
    return changed


def install(kubectl: Kubectl, definitions: Iterable[Path]) -> int:
    """Install custom resource definitions, and return how many there are."""
    for folder in definitions:
        for file in sorted(folder.glob("*.yaml")):
            if "kind: CustomResourceDefinition" in file.read_text():
                # Some are too long for the annotation that other ways of applying leave.
                kubectl("apply", "--server-side", "--filename", str(file))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return len(kubectl("get", "crd", "--output=name").splitlines())


def refusal(kubectl: Kubectl, verb: str, documents: Iterable[Document]) -> str:
    """Return why the API server refuses documents, or warns of one; empty if it takes them all."""
    text = yaml.safe_dump_all(documents)
    try:
        kubectl(
            *(verb, "--dry-run=server", "--warnings-as-errors", "--filename", "-"), content=text
        )
    except KubectlError as error:
        return str(error)
    return ""


def faults(kubectl: Kubectl) -> tuple[list[str], int]:
    """
    Ask about each rendering, and each template of pods.

    The namespace, and what pods name, are created for that time.

    Returns:
        What is refused, and the number of renderings and templates that were asked about.
    """
    renderings = render_all()
    templates = [pod for name, documents in renderings.items() for pod in pods(name, documents)]
    base = renderings["base"]
    kept = [one for one in base if one["kind"] in CRITICAL]
    found = []
    kubectl("apply", "--filename", str(KUBERNETES / "base/namespace.yaml"))
    kubectl("apply", "--filename", "-", content=yaml.safe_dump_all(kept))
    try:
        [deployment] = [one for one in base if one["kind"] == "Deployment"]
        if not refusal(kubectl, "apply", [with_unknown_field(deployment)]):
            found.append("a field that does not exist is not refused")
        if not refusal(kubectl, "create", [privileged(pod_of(templates[0]))]):
            found.append("a privileged pod is not refused")
        asked = [(name, "apply", documents) for name, documents in renderings.items()]
        asked += [(f"pod of {pod.where}", "create", [pod_of(pod)]) for pod in templates]
        for name, verb, documents in asked:
            if why := refusal(kubectl, verb, documents):
                found.append(f"{name}: {why}")
    finally:
        kubectl("delete", "--filename", "-", content=yaml.safe_dump_all(kept))
        kubectl("delete", "namespace", NAMESPACE)
    return found, len(asked)
