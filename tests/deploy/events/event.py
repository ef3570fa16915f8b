"""Events that befall a deployment while clients stream, for each harness that runs one."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

NUM_EXECUTORS = 2
"""Executors between events."""
SETTLED_S = 3.0
"""Seconds that streams go on after an event, and while a further executor is there."""

Cluster = TypeVar("Cluster")


class EventFailed(Exception):
    """Something that is not as it has to be during an event, streams aside."""


@dataclass(frozen=True, slots=True)
class Event(Generic[Cluster]):
    """
    One event that a row of the table is about.

    Attributes:
        text: The event in words.
        happen: Lets it happen; raises an EventFailed where something is not as it has to be.
        ends_scheduler: True where streams end with the scheduler, so that clients resume them.
        ends_gateway: True where a gateway ends, so that clients over HTTP ask another one.
    """

    text: str
    happen: Callable[[Cluster], None]
    ends_scheduler: bool = False
    ends_gateway: bool = False


def num_attached(host: str) -> int:
    """
    Return how many executors the scheduler's page of metrics says are attached.

    Args:
        host: Host of the scheduler.

    Raises:
        OSError: The page is not there.
    """
    with urllib.request.urlopen(f"http://{host}:9464/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    values = [
        line.split()[-1] for line in lines if line.startswith("tandem_each_executor_attached{")
    ]
    return sum(float(value) == 1.0 for value in values)
