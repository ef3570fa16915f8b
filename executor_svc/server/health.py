"""grpc.health.v1 of the executor: a fixed set of names, and a Watch that waits in its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MAX_SHOWN_CHARS = 100
"""Most characters of an unknown name that its refusal repeats."""

Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped
    """
    Health service of a fixed set of names, so that no caller can make it keep others.

    Its states may be set from any thread, and no watcher that is slow to read holds that up. A
    Watch takes the thread that it runs on until it ends: `CallPlaces` bounds their number.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = threading.Condition()

    def set(self, name: str, *, serving: bool) -> None:
        """Change the state of one of the names, and wake watchers."""
        with self._changed:
            self._serving[name] = serving
            self._changed.notify_all()

    def Check(  # noqa: N802  # named by the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Answer at once; NOT_FOUND for an unknown name, as the protocol says."""
        if request.service not in self._serving:
            shown = request.service[:MAX_SHOWN_CHARS]
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"no health name {shown!r}")
            return Response()
        return Response(status=self._status(request.service))

    def Watch(  # noqa: N802  # named by the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Send the state now and at every change; SERVICE_UNKNOWN for an unknown name."""
        if not context.add_callback(self._wake):
            return
        name = request.service if request.service in self._serving else None
        last: int | None = None
        while True:
            with self._changed:
                while context.is_active() and self._status(name) == last:
                    self._changed.wait()
                status = self._status(name)
            if not context.is_active():
                return
            last = status
            yield Response(status=status)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _status(self, name: str | None) -> int:
        if name is None:
            return int(Response.SERVICE_UNKNOWN)
        return int(Response.SERVING if self._serving[name] else Response.NOT_SERVING)
