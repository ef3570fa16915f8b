"""
Validates every rendering of deploy/kubernetes; `deploy/local/manifests` calls it with the tools.

Both validators first have to refuse a resource that is wrong. Exit status: 0 only if all that could
be validated is valid. Kinds without a schema are named NOT VALIDATED.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.deploy.kubernetes.manifests import KUBERNETES, Document, KubectlMissing, render_all

VERSIONS = ("1.34", "1.37")
"""Versions of Kubernetes whose schemas all built-in kinds have to fit."""
WITHOUT_SCHEMA = {"LeaderWorkerSet", "InferencePool"}
"""Kinds whose schemas no package has."""
EXIT_UNAVAILABLE = 75
CRDS = Path(__file__).with_name("crds.mjs")


def is_built_in(document: Document) -> bool:
    """Return whether a document's kind is one of Kubernetes itself."""
    group = document["apiVersion"].rpartition("/")[0]
    if "." not in group:
        return True
    return group.endswith(".k8s.io") and document["kind"] not in WITHOUT_SCHEMA


def refused_built_in(command: str, version: str, documents: Sequence[Document]) -> str:
    """Return what kubernetes-validate says against documents; empty if nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(documents, file)
        file.flush()
        done = subprocess.run(
            [command, "--strict", "--quiet", "-k", version, file.name],
            capture_output=True,
            text=True,
            check=False,
        )
    return done.stdout + done.stderr if done.returncode else ""


def verdicts(folder: Path, documents: Sequence[Document]) -> list[dict[str, str]]:
    """Return the verdict on each custom resource."""
    done = subprocess.run(
        ["node", str(CRDS), str(folder)],
        input=json.dumps(documents),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def wrong(document: Document, key: str, value: object) -> Document:
    """Return a copy of a document whose spec has another value."""
    changed = copy.deepcopy(document)
    changed["spec"][key] = value
    return changed


def unique(renderings: dict[str, list[Document]]) -> dict[str, tuple[str, Document]]:
    """Return each different document once, by its text, with the name of its first rendering."""
    found: dict[str, tuple[str, Document]] = {}
    for name, documents in renderings.items():
        for document in documents:
            found.setdefault(json.dumps(document, sort_keys=True), (name, document))
    return found


def faults_of_built_in(command: str, documents: Sequence[Document]) -> list[str]:
    """Return the faults of built-in kinds at all versions."""
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    faults = []
    for version in VERSIONS:
        if not refused_built_in(command, version, [wrong(deployment, "replica", 2)]):
            faults.append(f"Kubernetes {version}: the validator accepts an unknown key")
        if text := refused_built_in(command, version, documents):
            faults.append(f"Kubernetes {version}: {text}")
    return faults


def faults_of_custom(folder: Path, named: Sequence[tuple[str, Document]]) -> list[str]:
    """Return the faults of custom resources, and print which have no schema."""
    documents = [document for _, document in named]
    kinds = {one["kind"]: one for one in documents}
    faults = []
    for kind, key in (("ScaledObject", "pollingInterval"), ("PodMonitor", "podMetricsEndpoints")):
        if verdicts(folder, [wrong(kinds[kind], key, "often")])[0]["verdict"] != "invalid":
            faults.append(f"{kind}: the validator accepts a value of the wrong type")
    unknown = set()
    for (name, document), verdict in zip(named, verdicts(folder, documents), strict=True):
        if verdict["verdict"] == "invalid":
            faults.append(f"{name}: {document['kind']}: {verdict['message']}")
        if verdict["verdict"] == "unknown":
            unknown.add(document["kind"])
    if unknown - WITHOUT_SCHEMA:
        faults.append(f"no schema for {sorted(unknown - WITHOUT_SCHEMA)}")
    for kind in sorted(unknown & WITHOUT_SCHEMA):
        print(f"{kind}: NOT VALIDATED, no package has its schema")
    return faults


def main() -> int:
    """Render, validate, and print a summary."""
    parser = argparse.ArgumentParser(description="Validate deploy/kubernetes.")
    parser.add_argument("--kubernetes-validate", required=True, metavar="COMMAND")
    parser.add_argument("--schemas", required=True, type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    try:
        renderings = render_all()
    except KubectlMissing as error:
        print(f"manifests: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except ValueError as error:
        print(f"manifests: {error}", file=sys.stderr)
        return 1
    loader = KUBERNETES / "model-loader.yaml"
    renderings[loader.name] = list(yaml.safe_load_all(loader.read_text()))
    documents = list(unique(renderings).values())
    built_in = [document for _, document in documents if is_built_in(document)]
    custom = [(name, document) for name, document in documents if not is_built_in(document)]
    faults = faults_of_built_in(chosen.kubernetes_validate, built_in)
    faults += faults_of_custom(chosen.schemas, custom)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(
        f"{len(renderings)} renderings: {len(built_in)} different resources of built-in kinds at "
        f"Kubernetes {' and '.join(VERSIONS)}, {len(custom)} custom ones, {len(faults)} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
