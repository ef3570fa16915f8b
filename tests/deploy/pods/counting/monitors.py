"""Translates monitors of the Prometheus Operator into jobs of a prometheus.yml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.deploy.pods.translate import LocalPod

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """
    One page that Prometheus reads.

    Attributes:
        scrape: Name of the job, as the operator gives it.
        job: Value of the label `job`, as the operator sets it.
        pod: Name of the pod.
        port: Number of its port.
        path: Path of the page.
    """

    scrape: str
    job: str
    pod: str
    port: int
    path: str


class MonitorError(Exception):
    """A monitor that finds no pod, or no port of it."""


def targets_of(documents: Sequence[Document], pods: Sequence[LocalPod]) -> list[Target]:
    """
    Return the pages that the monitors of a rendering find among its pods.

    Raises:
        MonitorError: A monitor finds nothing.
    """
    found: list[Target] = []
    for document in documents:
        if document["kind"] == "PodMonitor":
            of_one = list(_of_pods(document, documents, pods))
        elif document["kind"] == "ServiceMonitor":
            of_one = list(_of_services(document, documents, pods))
        else:
            continue
        if not of_one:
            raise MonitorError(f"{document['kind']} {document['metadata']['name']} finds no pod")
        found += of_one
    return found


def configuration(
    targets: Sequence[Target], address: Callable[[str], str], interval: str
) -> Document:
    """
    Return the content of a prometheus.yml.

    Args:
        targets: The pages.
        address: Function from the name of a pod to its host.
        interval: Time between two scrapes, in place of the monitors' own.
    """
    jobs: dict[str, Document] = {}
    for one in targets:
        job = jobs.setdefault(
            one.scrape,
            {"job_name": one.scrape, "metrics_path": one.path, "static_configs": []},
        )
        labels = {"job": one.job, "pod": one.pod}
        job["static_configs"].append(
            {"targets": [f"{address(one.pod)}:{one.port}"], "labels": labels}
        )
    return {"global": {"scrape_interval": interval}, "scrape_configs": list(jobs.values())}


def _of_pods(
    monitor: Document, documents: Sequence[Document], pods: Sequence[LocalPod]
) -> Iterator[Target]:
    name = _name(monitor)
    selector = monitor["spec"]["selector"]["matchLabels"]
    for number, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"]):
        for pod in pods:
            if _has(pod, selector):
                yield Target(
                    scrape=f"podMonitor/{name}/{number}",
                    job=name,
                    pod=pod.name,
                    port=_port(documents, pod, endpoint["port"]),
                    path=endpoint.get("path", "/metrics"),
                )


def _of_services(
    monitor: Document, documents: Sequence[Document], pods: Sequence[LocalPod]
) -> Iterator[Target]:
    selector = monitor["spec"]["selector"]["matchLabels"]
    services = [
        one
        for one in documents
        if one["kind"] == "Service"
        and selector.items() <= one["metadata"].get("labels", {}).items()
    ]
    for number, endpoint in enumerate(monitor["spec"]["endpoints"]):
        for service in services:
            (port,) = [one for one in service["spec"]["ports"] if one["name"] == endpoint["port"]]
            for pod in pods:
                if _has(pod, service["spec"]["selector"]):
                    yield Target(
                        scrape=f"serviceMonitor/{_name(monitor)}/{number}",
                        job=service["metadata"]["name"],
                        pod=pod.name,
                        port=_port(documents, pod, port["targetPort"]),
                        path=endpoint.get("path", "/metrics"),
                    )


def _name(monitor: Document) -> str:
    return f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"


def _has(pod: LocalPod, selector: dict[str, str]) -> bool:
    return bool(selector.items() <= pod.document["metadata"]["labels"].items())


def _port(documents: Sequence[Document], pod: LocalPod, name: str) -> int:
    """Return the number of a port that the manifest of a pod's controller names."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            if document["metadata"]["name"] != pod.workload:
                continue
            for container in document["spec"]["template"]["spec"]["containers"]:
                for port in container.get("ports", ()):
                    if port["name"] == name:
                        return int(port["containerPort"])
    raise MonitorError(f"{pod.name} has no port {name}")
