"""Monitors of the Prometheus Operator become jobs that find the pods' pages."""

from __future__ import annotations

import copy

import pytest

from tests.deploy.kubernetes.manifests import KubectlMissing, render_combination
from tests.deploy.pods.counting.monitors import MonitorError, configuration, targets_of
from tests.deploy.pods.translate import translate
from tests.programs import is_missing


@pytest.fixture(scope="module")
def documents():
    try:
        return render_combination("local-podman", ("gateway", "monitoring"))
    except KubectlMissing as error:
        is_missing(str(error))


def targets(documents):
    translation = translate(
        documents,
        secrets={"tandem-link": {"token": b"a token of the link"}},
        claims={"tandem-models": "/srv/models"},
        folder="/run/secrets",
    )
    return targets_of(documents, translation.pods)


def test_pages_are_those_of_scheduler_and_gateways(documents):
    """
    The PodMonitor finds the scheduler's port of metrics, the ServiceMonitor every gateway's port
    behind its Service; executors have no page.
    """
    assert [
        ("tandem-scheduler-0", 9464, "/metrics", "tandem/tandem-scheduler"),
        ("tandem-gateway-0", 8000, "/metrics", "tandem-gateway"),
        ("tandem-gateway-1", 8000, "/metrics", "tandem-gateway"),
    ] == [(one.pod, one.port, one.path, one.job) for one in targets(documents)]


def test_jobs_name_addresses_and_pods(documents):
    """
    Each monitor is a job, and each page a target with the labels job and pod.
    """
    content = configuration(targets(documents), lambda pod: f"host-of-{pod}", "1s")
    assert {"scrape_interval": "1s"} == content["global"]
    scheduler, gateway = content["scrape_configs"]
    assert "podMonitor/tandem/tandem-scheduler/0" == scheduler["job_name"]
    assert "serviceMonitor/tandem/tandem-gateway/0" == gateway["job_name"]
    assert {
        "targets": ["host-of-tandem-gateway-1:8000"],
        "labels": {"job": "tandem-gateway", "pod": "tandem-gateway-1"},
    } == gateway["static_configs"][1]


def test_monitor_that_finds_no_pod_is_named(documents):
    """
    A monitor whose labels no pod has is an error that names it.
    """
    changed = copy.deepcopy(documents)
    (monitor,) = [one for one in changed if one["kind"] == "PodMonitor"]
    monitor["spec"]["selector"]["matchLabels"] = {"app.kubernetes.io/name": "another"}
    with pytest.raises(MonitorError, match="PodMonitor tandem-scheduler finds no pod"):
        targets(changed)


def test_monitor_of_a_port_that_is_not_there_is_named(documents):
    """
    A monitor that names no port of its pods is an error that names both.
    """
    changed = copy.deepcopy(documents)
    (monitor,) = [one for one in changed if one["kind"] == "PodMonitor"]
    monitor["spec"]["podMetricsEndpoints"][0]["port"] = "another"
    with pytest.raises(MonitorError, match="tandem-scheduler-0 has no port another"):
        targets(changed)
