"""The health servicer by itself, with watchers that the test plays."""

import asyncio

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from scheduler_svc.frontend.health import HealthServicer
from tests.scheduler_svc.frontend.fake_core import within

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
REQUEST = HealthCheckRequest(service="tandem.ready")


class Watcher:
    """Context of a Watch; a frozen one takes its first state and never comes back for another."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        self.statuses: asyncio.Queue[int] = asyncio.Queue()
        self._is_frozen = is_frozen

    async def write(self, response: HealthCheckResponse) -> None:
        self.statuses.put_nowait(response.status)
        if self._is_frozen:
            await asyncio.Event().wait()


async def test_frozen_watcher_holds_up_no_other_client():
    """
    While one watcher takes nothing, another watcher and Check see every change.
    """
    health = HealthServicer()
    health.set(REQUEST.service, True)
    frozen, other = Watcher(is_frozen=True), Watcher()
    watches = [asyncio.create_task(health.Watch(REQUEST, watcher)) for watcher in (frozen, other)]
    assert SERVING == await within(frozen.statuses.get())
    assert SERVING == await within(other.statuses.get())
    for is_serving, status in ((False, NOT_SERVING), (True, SERVING)):
        health.set(REQUEST.service, is_serving)
        assert status == await within(other.statuses.get())
        assert status == (await health.Check(REQUEST, None)).status
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
