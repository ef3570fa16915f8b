"""The real Prometheus on this machine, which reads the pods' pages and is asked what it counted."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from tests.deploy.pods.counting.monitors import Document
from tests.deploy.prometheus import PrometheusError, PrometheusProcess
from tests.waiting import TooLate, wait_until

INTERVAL_S = 3
"""Seconds between two scrapes, and the longest time of one."""
LIMIT_S = 60.0
"""Longest time until a page is read."""


class Prometheus(PrometheusProcess):
    """A running Prometheus. Owned by the harness, which calls `close`."""

    def __init__(self, folder: Path, content: Document) -> None:
        """
        Start it, and wait until it has read something.

        Args:
            folder: Folder for its files.
            content: Content of its prometheus.yml.

        Raises:
            PrometheusError: It is missing, or does not start.
        """
        folder.mkdir()
        super().__init__(folder, content)

    def ask(self, query: str) -> dict[str, float]:
        """
        Return the values that a query has now, by the label `pod`, or by "" without one.

        Raises:
            PrometheusError: Prometheus refuses the query.
        """
        return {one.labels.get("pod", ""): one.value for one in self.samples(query)}

    def settle(self, pods: Iterable[str]) -> None:
        """
        Wait until the pages of some pods have been read once more, from the first line to the last.

        Raises:
            PrometheusError: They are not, within `LIMIT_S`.
        """
        began_s = time.time()
        unread = set(pods)

        def are_read() -> bool:
            read = self.ask("timestamp(up) and up == 1")
            unread.difference_update(pod for pod, at_s in read.items() if at_s > began_s)
            return not unread

        try:
            wait_until(are_read, "Prometheus reads the pages", LIMIT_S, 0.2)
        except TooLate as error:
            raise PrometheusError(f"Prometheus cannot read {', '.join(sorted(unread))}") from error
