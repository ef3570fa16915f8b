"""Metrics of the gateway, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """
    Counters of one gateway, in a registry of its own.

    Attributes:
        requests: Requests answered, by path and status.
        seconds: Durations of requests, by path.
        running: Requests being answered now.
        output_tokens: Tokens sent to clients.
        resumes: Tries to resume a stream whose scheduler broke off.
    """

    def __init__(self, num_ready: Callable[[], float]) -> None:
        """
        Args:
            num_ready: Function that returns the number of schedulers that serve requests now.
        """
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_gateway_requests", "Requests answered", ("path", "status"),
            registry=self._registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "tandem_gateway_request_seconds", "Durations of requests", ("path",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.running = Gauge(
            "tandem_gateway_running_requests", "Requests being answered", registry=self._registry
        )
        self.output_tokens = Counter(
            "tandem_gateway_output_tokens", "Tokens sent to clients", registry=self._registry
        )
        self.resumes = Counter(
            "tandem_gateway_resumes",
            "Tries to resume a stream whose scheduler broke off",
            registry=self._registry,
        )
        ready = Gauge(
            "tandem_gateway_ready_schedulers",
            "Schedulers that serve requests",
            registry=self._registry,
        )
        ready.set_function(num_ready)

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return generate_latest(self._registry)
