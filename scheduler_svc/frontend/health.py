"""
grpc.health.v1 with a Watch that sends the newest state and waits for no slow watcher.

The servicer of grpcio-health-checking (1.85.1, `grpc_health.v1.health.aio`) writes to a watcher
while it holds the lock that a change of the name needs: a client that is stopped with a full
connection then keeps the old state for every other Watch and Check, until keepalive ends it. The
test `test_frozen_watcher_holds_up_no_other_client` fails with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.frontend.calls.batches import status_follows
from scheduler_svc.frontend.calls.rpc_handlers import write
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.intake.connection import connection_of
from tandem.errors import InvalidParameter, QueueFull

LIVE, READY, PROGRESS = "", "tandem.ready", "tandem.progress"
MAX_SHOWN_CHARS = 100
"""Most characters of an unknown name that its refusal repeats."""
MAX_REQUEST_BYTES = 4096
"""Size of the largest request of a Watch, which is in memory as long as its call."""
MAX_WATCHERS = 1024
"""Most watchers of the process at a time, as they need no credential; Check is always answered."""
MAX_WATCHERS_OF_CONNECTION = 32

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
        self._knows_more = asyncio.Event()
        """Set when the next name becomes known; then there is another one."""
        self._num_watchers = 0
        self._of_connection: Counter[str] = Counter()
        """Watchers of connections that have some."""

    def set(self, name: str, serving: bool) -> None:
        """Change one name's state and wake its watchers."""
        if self._serving.get(name) is serving:
            return
        if name not in self._serving:
            self._knows_more.set()
            self._knows_more = asyncio.Event()
        self._serving[name] = serving
        for changed in self._watchers.get(name, ()):
            changed.set()

    async def Check(  # noqa: N802  # named by the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answer at once; NOT_FOUND for an unknown name, as the protocol says."""
        if request.service not in self._serving:
            shown = request.service[:MAX_SHOWN_CHARS]
            status_follows()
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no health name {shown!r}; known: {sorted(self._serving)}",
            )
        return Response(status=self._status(request.service))

    async def Watch(  # noqa: N802  # named by the proto
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """
        Send the state now and at every change; for an unknown name SERVICE_UNKNOWN, and its state
        once it is known. A watcher takes one place, whatever its name, and no memory for the name.

        Raises:
            InvalidParameter: The request is larger than any name is long.
            QueueFull: There are too many watchers, of the process or of this connection.
        """
        if request.ByteSize() > MAX_REQUEST_BYTES:
            raise InvalidParameter(
                f"a request to watch a health name has at most {MAX_REQUEST_BYTES} bytes, and this "
                f"one has {request.ByteSize()}",
                field="service",
            )
        with self._place(connection_of(context.peer(), context)):
            await self._watch(request.service, context)

    async def _watch(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        changed = asyncio.Event()
        if name not in self._serving:
            await write(context, Response(status=self._status(name)))
        while name not in self._serving:
            await self._knows_more.wait()
        watchers = self._watchers.setdefault(name, set())
        watchers.add(changed)
        last = None
        try:
            while True:
                changed.clear()
                status = self._status(name)
                if status != last:
                    last = status
                    await write(context, Response(status=status))
                else:
                    await changed.wait()
        finally:
            watchers.discard(changed)
            if not watchers:
                self._watchers.pop(name, None)

    @contextmanager
    def _place(self, connection: str) -> Iterator[None]:
        """Hold one of the places of watchers."""
        for num, most, whose in (
            (self._num_watchers, MAX_WATCHERS, "this server"),
            (self._of_connection[connection], MAX_WATCHERS_OF_CONNECTION, "this connection"),
        ):
            if num >= most:
                raise QueueFull(
                    f"{whose} has {most} health watchers already: close one, or ask by Check",
                    metadata={"limit": "lasting_calls", "value": str(most)},
                )
        self._num_watchers += 1
        self._of_connection[connection] += 1
        try:
            yield
        finally:
            self._num_watchers -= 1
            self._of_connection[connection] -= 1
            if not self._of_connection[connection]:
                del self._of_connection[connection]

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
