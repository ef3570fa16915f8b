"""Times at which a service reported that it is ready, or not."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_RETRY_S = 0.05


class ReadinessWatch:
    """
    Watch on `tandem.ready` of one address, on a thread, as of a load balancer.

    Attributes:
        changes: (monotonic seconds, ready) of every change, the first answer included.
    """

    def __init__(self, address: str) -> None:
        self.changes: list[tuple[float, bool]] = []
        self._address = address
        self._is_over = False
        self._call: Any = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def num_times_off(self) -> int:
        """Return how often the service turned from ready to not ready."""
        states = [is_ready for _, is_ready in self.changes]
        return sum(one and not other for one, other in itertools.pairwise(states))

    def is_ready(self) -> bool:
        """Return the latest report."""
        return bool(self.changes) and self.changes[-1][1]

    def close(self) -> None:
        """Stop watching."""
        self._is_over = True
        if self._call is not None:
            self._call.cancel()
        self._thread.join(10)

    def _follow(self) -> None:
        options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200))
        with grpc.insecure_channel(self._address, options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._is_over:
                try:
                    self._call = stub.Watch(health_pb2.HealthCheckRequest(service="tandem.ready"))
                    for answer in self._call:
                        self._note(answer.status == health_pb2.HealthCheckResponse.SERVING)
                except grpc.RpcError:
                    if not self._is_over:
                        self._note(False)
                        time.sleep(_RETRY_S)

    def _note(self, is_ready: bool) -> None:
        if not self.changes or self.changes[-1][1] != is_ready:
            self.changes.append((time.monotonic(), is_ready))
