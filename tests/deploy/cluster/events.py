"""Events that happen to pods in a cluster, while clients stream."""

from __future__ import annotations

import json
import time

from tests.deploy.cluster.cluster import EXECUTORS, NAMESPACE, SCHEDULER, Cluster, KubectlError
from tests.deploy.events.event import NUM_EXECUTORS, SETTLED_S, Event, EventFailed

FIRST, SECOND = "tandem-executor-0", "tandem-executor-1"


class NotRefused(EventFailed):
    """The cluster allowed what it had to refuse."""


def kill(cluster: Cluster) -> None:
    """Kill an executor's process, as a lack of memory does; the kubelet starts it again."""
    before = cluster.num_restarts(SECOND)
    cluster.runtime.kill(cluster.container(SECOND))
    cluster.wait_for_restart(SECOND, before)


def delete(cluster: Cluster) -> None:
    """Delete an executor's pod: SIGTERM and its grace time, then a new pod of the StatefulSet."""
    cluster.in_namespace("delete", "pod", SECOND)


def delete_by_force(cluster: Cluster) -> None:
    """Delete an executor's pod without a grace time."""
    cluster.in_namespace("delete", "pod", SECOND, "--force", "--grace-period=0")


def hang(cluster: Cluster) -> None:
    """Freeze an executor's processes until its liveness probe makes the kubelet start it again."""
    before = cluster.num_restarts(FIRST)
    cluster.runtime.pause(cluster.container(FIRST))
    cluster.wait_for_restart(FIRST, before)


def scale_out_and_in(cluster: Cluster) -> None:
    """Add a third executor, and take it away again."""
    cluster.in_namespace("scale", EXECUTORS, f"--replicas={NUM_EXECUTORS + 1}")
    cluster.wait_for(NUM_EXECUTORS + 1)
    time.sleep(SETTLED_S)
    cluster.in_namespace("scale", EXECUTORS, f"--replicas={NUM_EXECUTORS}")
    cluster.in_namespace("wait", "--for=delete", "pod/tandem-executor-2", "--timeout=60s")


def evict(cluster: Cluster, pod: str) -> None:
    """Ask for the eviction of a pod, as `kubectl drain` does."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": NAMESPACE},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    cluster.kubectl("create", "--raw", path, "--filename", "-", content=json.dumps(eviction))


def evict_both(cluster: Cluster) -> None:
    """Evict an executor, and let the disruption budget refuse the other meanwhile."""
    evict(cluster, SECOND)
    try:
        evict(cluster, FIRST)
    except KubectlError as error:
        if "disruption budget" not in str(error):
            raise
    else:
        raise NotRefused("both executors were evicted at the same time")
    cluster.in_namespace("wait", "--for=delete", f"pod/{SECOND}", "--timeout=60s")


def restart_executors(cluster: Cluster) -> None:
    """Replace the executors by a rollout of their StatefulSet."""
    cluster.in_namespace("rollout", "restart", EXECUTORS)
    cluster.wait_for(NUM_EXECUTORS)


def restart_scheduler(cluster: Cluster) -> None:
    """Replace the scheduler by a rollout: preStop, SIGTERM and its grace time, then a new pod."""
    cluster.in_namespace("rollout", "restart", SCHEDULER)
    cluster.wait_for(NUM_EXECUTORS)


def kill_scheduler(cluster: Cluster) -> None:
    """Kill the scheduler's first process; the kubelet starts its container again."""
    pod = cluster.scheduler_pod()
    before = cluster.num_restarts(pod)
    cluster.runtime.kill(cluster.container(pod))
    cluster.wait_for_restart(pod, before)


def delete_scheduler_by_force(cluster: Cluster) -> None:
    """Delete the scheduler's pod without a grace time, as when its node is given up."""
    cluster.in_namespace("delete", "pod", cluster.scheduler_pod(), "--force", "--grace-period=0")


EVENTS = (
    Event("an executor's process killed (SIGKILL), started again by the kubelet", kill),
    Event("`kubectl delete pod` of an executor (SIGTERM, grace time)", delete),
    Event("`kubectl delete pod --force` of an executor", delete_by_force),
    Event("an executor frozen until its liveness probe has it started again", hang),
    Event("`kubectl scale` of the executors to 3, and back to 2", scale_out_and_in),
    Event("an executor evicted; the budget refuses the other meanwhile", evict_both),
    Event("`kubectl rollout restart` of the executors, one after another", restart_executors),
    Event(
        "`kubectl rollout restart` of the scheduler (preStop, SIGTERM); clients resume",
        restart_scheduler,
        ends_scheduler=True,
    ),
    Event(
        "the scheduler's process killed (SIGKILL); clients resume",
        kill_scheduler,
        ends_scheduler=True,
    ),
    Event(
        "`kubectl delete pod --force` of the scheduler; clients resume",
        delete_scheduler_by_force,
        ends_scheduler=True,
    ),
)
