"""
grpc.health.v1 with a Watch that sends the newest state and waits for no slow watcher.

The servicer of grpcio-health-checking (1.85.1, `grpc_health.v1.health.aio`) writes to a watcher
while it holds the lock that a change of the name needs: a client that is stopped with a full
connection then keeps the old state for every other Watch and Check, until keepalive ends it. The
test `test_frozen_watcher_holds_up_no_other_client` fails with it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.frontend.core_client import CoreClient

LIVE, READY, PROGRESS = "", "tandem.ready", "tandem.progress"
MAX_SHOWN_CHARS = 100
"""Most characters of an unknown name that its refusal repeats."""

Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped
    """
    Health service for any number of names. Owned by the event loop.

    The names are "" for liveness, "tandem.ready", "tandem.progress", and the gRPC services, which
    have the state of "tandem.ready".
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}

    def set(self, name: str, serving: bool) -> None:
        """Change one name's state and wake its watchers."""
        if self._serving.get(name) is serving:
            return
        self._serving[name] = serving
        for changed in self._watchers.get(name, ()):
            changed.set()

    async def Check(  # noqa: N802  # named by the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answer at once; NOT_FOUND for an unknown name, as the protocol says."""
        if request.service not in self._serving:
            shown = request.service[:MAX_SHOWN_CHARS]
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no health name {shown!r}; known: {sorted(self._serving)}",
            )
        return Response(status=self._status(request.service))

    async def Watch(  # noqa: N802  # named by the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send the state now and at every change; SERVICE_UNKNOWN while a name is unknown."""
        changed = asyncio.Event()
        watchers = self._watchers.setdefault(request.service, set())
        watchers.add(changed)
        last = None
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != last:
                    last = status
                    await context.write(Response(status=status))
                else:
                    await changed.wait()
        finally:
            watchers.discard(changed)
            if not watchers:
                self._watchers.pop(request.service, None)

    def _status(self, name: str) -> int:
        serving = self._serving.get(name)
        if serving is None:
            return int(Response.SERVICE_UNKNOWN)
        return int(Response.SERVING if serving else Response.NOT_SERVING)


def publish_health(
    core: CoreClient, health: HealthServicer, service_names: tuple[str, ...]
) -> None:
    """Set every name from the core's state now, and again at every change."""

    def publish() -> None:
        alive, availability = core.is_alive(), core.availability
        ready = alive and availability.ready and not availability.draining and core.served.is_loaded
        health.set(LIVE, alive and availability.frontends_alive)
        health.set(PROGRESS, alive and availability.progressing and not core.is_late())
        for name in (READY, *service_names):
            health.set(name, ready)

    core.on_change(publish)
    publish()
