"""Numbers of finished streams, as clients and as Prometheus count them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tests.deploy.pods.cluster import Watched
from tests.deploy.pods.setting import NUM_EXECUTORS
from tests.deploy.pods.streams.load import HTTP, Outcome

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

    def close(
        self, outcomes: Mapping[str, Outcome], *, has_one_scheduler: bool
    ) -> tuple[Counts, list[str]]:
        """
        Compare with what the clients counted.

        Args:
            outcomes: Outcome of each client; streams that failed may be counted or not.
            has_one_scheduler: True if no process of the scheduler ended: a new one counts from 0.

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
        since = f"[{int(time.monotonic() - self._began_s)}s]"
        up = prometheus.ask(f"min_over_time(up{since})" if has_one_scheduler else "up")
        if up != dict.fromkeys(self._watched.pages, 1.0):
            problems.append(f"Prometheus did not reach every page: {up}")
        if prometheus.ask(ATTACHED) != {"": NUM_EXECUTORS}:
            problems.append(f"Prometheus sees executors that are not attached: {ATTACHED}")
        if any(outcome.failures for outcome in outcomes.values()):
            return counts, problems
        finished = sum(outcome.finished for outcome in outcomes.values())
        if has_one_scheduler and counts.of_scheduler != finished:
            problems.append(f"clients finished {finished} streams, the scheduler: {counts}")
        if counts.of_gateways != outcomes[HTTP].finished:
            of_http = outcomes[HTTP].finished
            problems.append(f"clients over HTTP finished {of_http} streams, the gateways: {counts}")
        return counts, problems

    def _counts(self) -> Counts:
        ask = self._watched.prometheus.ask
        return Counts(
            int(ask(OF_SCHEDULER).get("", 0.0)),
            int(ask(OF_GATEWAYS).get("", 0.0)),
        )
