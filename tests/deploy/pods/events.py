"""Events that befall pods, and those that befall their certificates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.deploy.pods.certificates.rotation import renew, replace_authorities
from tests.deploy.pods.cluster import LATER, SCHEDULER, Cluster
from tests.deploy.pods.setting import NUM_EXECUTORS

PAUSED_S = 8.0
SETTLED_S = 3.0
"""Seconds that streams run before an event, and after it."""


def kill(cluster: Cluster) -> None:
    """Kill an executor, as a lack of memory does, and start its container again."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.kill(one)
    cluster.pods.restart(one)


def stop(cluster: Cluster) -> None:
    """End an executor with SIGTERM and its grace time, and start a new pod."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.stop(one)
    cluster.pods.play(one)


def pause(cluster: Cluster) -> None:
    """Let an executor stand still, and go on."""
    one = cluster.named("tandem-executor-0")
    cluster.pods.pause(one)
    time.sleep(PAUSED_S)
    cluster.pods.unpause(one)


def replace_all(cluster: Cluster) -> None:
    """Replace the executors one after another, as a rollout of their StatefulSet does."""
    for name in ("tandem-executor-1", "tandem-executor-0"):
        one = cluster.named(name)
        cluster.pods.stop(one)
        cluster.pods.play(one)
        cluster.wait_for(NUM_EXECUTORS)


def cut_off(cluster: Cluster) -> None:
    """Let an executor's network be gone for a while."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.cut_off(one)
    time.sleep(PAUSED_S)
    cluster.pods.join(one)


def run_out_of_memory(cluster: Cluster) -> None:
    """Let the kernel kill an executor for its memory limit, and start its container again."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.fill_memory(one)
    cluster.pods.restart(one)


def scale_out_and_in(cluster: Cluster) -> None:
    """Let a third executor join, and leave again."""
    third = cluster.named(LATER)
    cluster.pods.play(third)
    cluster.wait_for(3)
    time.sleep(SETTLED_S)
    cluster.pods.stop(third)
    cluster.pods.remove(third)


def replace_scheduler(cluster: Cluster) -> None:
    """End the scheduler with SIGTERM and its grace time, and start a new pod at its address."""
    one = cluster.named(SCHEDULER)
    cluster.pods.stop(one)
    cluster.pods.play(one, has_fixed_address=True)


def kill_scheduler(cluster: Cluster) -> None:
    """Kill the scheduler, and start its container again."""
    one = cluster.named(SCHEDULER)
    cluster.pods.kill(one)
    cluster.pods.restart(one)


@dataclass(frozen=True, slots=True)
class Event:
    """
    One event that a row of the table is about.

    Attributes:
        text: The event in words.
        happen: Lets it happen; raises a RotationError where something is not as it should be.
        ends_scheduler: True where streams end with the scheduler, so that clients resume them.
    """

    text: str
    happen: Callable[[Cluster], None]
    ends_scheduler: bool = False


EVENTS = (
    Event("one executor of two killed (SIGKILL), its container started again", kill),
    Event("one executor of two told to stop (SIGTERM), then a new pod", stop),
    Event(f"one executor of two paused for {PAUSED_S:g} s", pause),
    Event(f"one executor of two cut off from the network for {PAUSED_S:g} s", cut_off),
    Event("one executor of two killed for its memory limit, started again", run_out_of_memory),
    Event("a third executor joins, and leaves (SIGTERM)", scale_out_and_in),
    Event("both executors replaced, one after another", replace_all),
    Event("scheduler replaced (SIGTERM, then a new pod); clients resume", replace_scheduler, True),
    Event("scheduler killed (SIGKILL) and started again; clients resume", kill_scheduler, True),
)
"""Events of the pods of overlays/local-podman."""
ROTATIONS = (
    Event("all certificates renewed by the same authorities", renew),
    Event("authorities and certificates replaced, then an executor", replace_authorities),
)
"""Events of those of overlays/local-podman-tls."""
