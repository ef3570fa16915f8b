"""Lets an event happen under streams, and says what became of them."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

from tests.deploy.events.event import NUM_EXECUTORS, SETTLED_S, Event, EventFailed
from tests.deploy.events.streams.load import Load
from tests.deploy.events.table import Row
from tests.waiting import TooLate


class Waiting(Protocol):
    """A cluster that can be waited for."""

    def wait_for(self, num_executors: int) -> None:
        """Wait until it serves with a number of executors."""


Cluster = TypeVar("Cluster", bound=Waiting)


def measure(event: Event[Cluster], cluster: Cluster, load: Load) -> Row:
    """
    Let an event happen when all streams run, and return what became of them.

    Args:
        event: The event.
        cluster: The cluster, which serves with `NUM_EXECUTORS`, and has to afterwards.
        load: The streams, which have not been started yet.

    Raises:
        TooLate: The cluster does not serve again.
    """
    problems = []
    load.start()
    try:
        try:
            load.wait_until_running()
        except TooLate as error:
            problems.append(str(error))
        try:
            event.happen(cluster)
        except EventFailed as error:
            problems.append(str(error))
        cluster.wait_for(NUM_EXECUTORS)
        time.sleep(SETTLED_S)
    finally:
        load.stop()
    return Row(
        event=event.text,
        outcomes=load.end(),
        problems=problems,
        ends_scheduler=event.ends_scheduler,
        ends_gateway=event.ends_gateway,
    )
