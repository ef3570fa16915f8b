"""Events that befall pods, and those that befall their certificates."""

from __future__ import annotations

import time

from tests.deploy.events.event import NUM_EXECUTORS, SETTLED_S, Event
from tests.deploy.pods.certificates.rotation import renew, replace_authorities
from tests.deploy.pods.cluster import FIRST, GATEWAY, LATER, SCHEDULER, SECOND, Cluster

PAUSED_S = 8.0


def kill(cluster: Cluster) -> None:
    """Kill an executor, and start its container again."""
    cluster.kill_and_restart(SECOND)


def stop(cluster: Cluster) -> None:
    """Replace an executor."""
    cluster.replace(SECOND)


def pause(cluster: Cluster) -> None:
    """Freeze an executor's processes for a while."""
    one = cluster.named(FIRST)
    cluster.pods.pause(one)
    time.sleep(PAUSED_S)
    cluster.pods.unpause(one)


def replace_all(cluster: Cluster) -> None:
    """Replace the executors one after another, as a rollout of their StatefulSet does."""
    for name in (SECOND, FIRST):
        cluster.replace(name)
        cluster.wait_for(NUM_EXECUTORS)


def cut_off(cluster: Cluster) -> None:
    """Separate an executor from the network for a while."""
    one = cluster.named(SECOND)
    cluster.pods.cut_off(one)
    time.sleep(PAUSED_S)
    cluster.pods.join(one)


def run_out_of_memory(cluster: Cluster) -> None:
    """Have the kernel kill an executor for its memory limit, and start its container again."""
    one = cluster.named(SECOND)
    cluster.pods.fill_memory(one)
    cluster.pods.restart(one)


def scale_out_and_in(cluster: Cluster) -> None:
    """Add a third executor, and end it again."""
    third = cluster.named(LATER)
    cluster.play(third)
    cluster.wait_for(NUM_EXECUTORS + 1)
    time.sleep(SETTLED_S)
    cluster.pods.stop(third)
    cluster.pods.remove(third)


def replace_gateway(cluster: Cluster) -> None:
    """Replace a gateway, whose streams run to their end in its grace time."""
    cluster.replace(GATEWAY)


def replace_scheduler(cluster: Cluster) -> None:
    """Replace the scheduler by a pod at its address."""
    cluster.replace(SCHEDULER)


def kill_scheduler(cluster: Cluster) -> None:
    """Kill the scheduler, and start its container again."""
    cluster.kill_and_restart(SCHEDULER)


EVENTS = (
    Event("one executor of two killed (SIGKILL), its container started again", kill),
    Event("one executor of two told to stop (SIGTERM), then a new pod", stop),
    Event(f"one executor of two paused for {PAUSED_S:g} s", pause),
    Event(f"one executor of two cut off from the network for {PAUSED_S:g} s", cut_off),
    Event("one executor of two killed for its memory limit, started again", run_out_of_memory),
    Event("a third executor joins, and leaves (SIGTERM)", scale_out_and_in),
    Event("both executors replaced, one after another", replace_all),
    Event(
        "one gateway of two replaced (SIGTERM, then a new pod); its clients ask the other",
        replace_gateway,
        ends_gateway=True,
    ),
    Event(
        "scheduler replaced (SIGTERM, then a new pod); clients resume",
        replace_scheduler,
        ends_scheduler=True,
    ),
    Event(
        "scheduler killed (SIGKILL) and started again; clients resume",
        kill_scheduler,
        ends_scheduler=True,
    ),
)
"""Events of the pods of overlays/local-podman."""
ROTATIONS = (
    Event("all certificates renewed by the same authorities", renew),
    Event("authorities and certificates replaced, then an executor", replace_authorities),
)
"""Events of those of overlays/local-podman-tls."""
