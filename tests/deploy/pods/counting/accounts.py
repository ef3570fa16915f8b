"""Numbers of finished streams, as clients and as Prometheus count them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.deploy.events.event import NUM_EXECUTORS
from tests.deploy.events.streams.callers import HTTP
from tests.deploy.events.table import Row
from tests.deploy.pods.cluster import GATEWAY, SCHEDULER, Watched

OF_SCHEDULER = 'sum(tandem_requests_total{outcome="finished"})'
OF_GATEWAYS = 'sum(tandem_gateway_requests_total{path="/v1/completions",status="200"})'
ATTACHED = "sum(tandem_each_executor_attached)"


@dataclass(frozen=True, slots=True)
class Counts:
    """Finished streams by the counters of the scheduler, and by those of all gateways."""

    of_scheduler: int
    of_gateways: int


class Accounts:
    """Counters of one event, as Prometheus saw them from before it on."""

    def __init__(self, watched: Watched) -> None:
        """Read the counters after a scrape."""
        self._watched = watched
        watched.prometheus.settle(watched.pages)
        self._began_s = time.monotonic()
        self._before = self._counts()

    def close(self, row: Row) -> tuple[Counts, list[str]]:
        """
        Compare with what the clients counted.

        Args:
            row: What became of the streams; those that failed may be counted or not. A pod that
                ended counts from 0 again, so that its counts are not compared.

        Returns:
            The streams that Prometheus counted meanwhile, and what is wrong, in sentences.
        """
        prometheus = self._watched.prometheus
        prometheus.settle(self._watched.pages)
        now = self._counts()
        counts = Counts(
            now.of_scheduler - self._before.of_scheduler, now.of_gateways - self._before.of_gateways
        )
        problems = []
        ended = {SCHEDULER} if row.ends_scheduler else {GATEWAY} if row.ends_gateway else set()
        since = f"[{int(time.monotonic() - self._began_s)}s]"
        lowest = prometheus.ask(f"min_over_time(up{since})")
        if missed := {pod for pod in self._watched.pages - ended if lowest.get(pod) != 1.0}:
            problems.append(f"Prometheus did not reach every page of {', '.join(sorted(missed))}")
        if prometheus.ask("up") != dict.fromkeys(self._watched.pages, 1.0):
            problems.append("Prometheus does not reach every page after the event")
        if prometheus.ask(ATTACHED) != {"": NUM_EXECUTORS}:
            problems.append(f"Prometheus sees executors that are not attached: {ATTACHED}")
        if row.failures:
            return counts, problems
        if not row.ends_scheduler and counts.of_scheduler != row.finished:
            problems.append(f"clients finished {row.finished} streams, the scheduler: {counts}")
        of_http = row.outcomes[HTTP].finished
        if not row.ends_gateway and counts.of_gateways != of_http:
            problems.append(f"clients over HTTP finished {of_http} streams, the gateways: {counts}")
        return counts, problems

    def _counts(self) -> Counts:
        ask = self._watched.prometheus.ask
        return Counts(
            int(ask(OF_SCHEDULER).get("", 0.0)),
            int(ask(OF_GATEWAYS).get("", 0.0)),
        )
