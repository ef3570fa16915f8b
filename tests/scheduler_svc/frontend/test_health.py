"""The health service: its servicer with watchers that the test plays, and at the public port."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from structlog.testing import capture_logs

from scheduler_svc.frontend import health as health_module
from scheduler_svc.frontend.calls.batches import DELAY_S
from scheduler_svc.frontend.health import MAX_REQUEST_BYTES, HealthServicer
from tandem.errors import InvalidParameter, QueueFull
from tandem.status import from_rpc_error
from tests.faults.fuzz.tcp.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    Frame,
    call_headers,
    encode,
    header_block,
)
from tests.scheduler_svc.frontend.fake_core import running_frontend, within

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN
REQUEST = HealthCheckRequest(service="tandem.ready")
UNKNOWN_REQUEST = HealthCheckRequest(service="someone.else")


class Watcher:
    """Context of a Watch; a frozen one takes its first state and never comes back for another."""

    def __init__(self, peer: str = "ipv4:10.0.0.1:4000", *, is_frozen: bool = False) -> None:
        self._peer = peer
        self.statuses: asyncio.Queue[int] = asyncio.Queue()
        self._is_frozen = is_frozen

    def peer(self) -> str:
        return self._peer

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


async def test_connection_has_no_more_watchers_than_its_share(health):
    """
    A watcher over a connection's limit is QUEUE_FULL, others of other connections are served, and
    one that ends gives its place back.
    """
    limit = health_module.MAX_WATCHERS_OF_CONNECTION
    async with watching(health, [Watcher() for _ in range(limit)]) as watches:
        with pytest.raises(QueueFull) as refused:
            await health.Watch(REQUEST, Watcher())
        assert {"limit": "lasting_calls", "value": str(limit)} == refused.value.metadata
        async with watching(health, [Watcher("ipv4:10.0.0.2:4000")]):
            pass
        watches[0].cancel()
        await asyncio.gather(watches[0], return_exceptions=True)
        async with watching(health, [Watcher()]):
            pass


async def test_process_has_no_more_watchers_than_its_limit(health, monkeypatch):
    """
    Watchers of all connections together are bounded, too, and Check is answered beside them.
    """
    monkeypatch.setattr(health_module, "MAX_WATCHERS", 3)
    watchers = [Watcher(f"ipv4:10.0.0.{number}:4000") for number in range(4)]
    async with watching(health, watchers[:3]):
        with pytest.raises(QueueFull, match="this server has 3 health watchers already"):
            await health.Watch(REQUEST, watchers[3])
        assert SERVING == (await health.Check(REQUEST, None)).status
    async with watching(health, watchers[3:]):
        pass


async def test_unknown_name_is_answered_and_not_kept(health):
    """
    A watcher of an unknown name is told so, takes a place while it stays, and leaves no name.
    """
    watcher = Watcher()
    watch = asyncio.create_task(health.Watch(UNKNOWN_REQUEST, watcher))
    assert UNKNOWN == await within(watcher.statuses.get())
    assert {} == health._watchers
    assert 1 == health._num_watchers
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert 0 == health._num_watchers


async def test_unknown_name_that_becomes_known_is_told(health):
    """
    A watcher of an unknown name hears of it once it is known, and of its changes, as the health
    protocol says; other names that become known do not reach it.
    """
    watcher = Watcher()
    async with watching(health, [Watcher()]):
        watch = asyncio.create_task(health.Watch(UNKNOWN_REQUEST, watcher))
        assert UNKNOWN == await within(watcher.statuses.get())
        health.set("another", True)
        for is_serving, status in ((False, NOT_SERVING), (True, SERVING)):
            health.set(UNKNOWN_REQUEST.service, is_serving)
            assert status == await within(watcher.statuses.get())
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    assert {} == health._watchers


async def test_watchers_of_unknown_names_are_bounded(health):
    """
    Watchers of unknown names take the places of their connection as others do.
    """
    limit = health_module.MAX_WATCHERS_OF_CONNECTION
    watchers = [Watcher() for _ in range(limit)]
    watches = [asyncio.create_task(health.Watch(UNKNOWN_REQUEST, one)) for one in watchers]
    for watcher in watchers:
        assert UNKNOWN == await within(watcher.statuses.get())
    with pytest.raises(QueueFull):
        await health.Watch(UNKNOWN_REQUEST, Watcher())
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    assert 0 == health._num_watchers


async def test_large_request_to_watch_is_refused(health):
    """
    A request that would take more memory for as long as its call than a name does is refused.
    """
    with pytest.raises(InvalidParameter) as refused:
        await health.Watch(HealthCheckRequest(service="a" * MAX_REQUEST_BYTES), Watcher())
    assert "service" == refused.value.field


async def test_public_port_refuses_watchers_of_one_connection(tmp_path):
    """
    Of many watchers of one connection those over its limit end RESOURCE_EXHAUSTED, typed.
    """
    async with running_frontend(tmp_path) as frontend:
        stub = HealthStub(frontend.channel)
        limit = health_module.MAX_WATCHERS_OF_CONNECTION
        calls = [stub.Watch(REQUEST) for _ in range(limit + 5)]
        answers = await within(asyncio.gather(*(first_of(call) for call in calls)))
        assert limit == answers.count(NOT_SERVING)
        assert 5 == sum(isinstance(answer, QueueFull) for answer in answers)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_clients_that_go_are_no_bugs(tmp_path, method):
    """
    Hundreds of clients ask about a name that is not known and go at once, before or while they are
    answered: the log has no line about a broken call.
    """
    path = f"/grpc.health.v1.Health/{method}".encode()
    async with running_frontend(tmp_path) as frontend:
        with capture_logs() as lines:
            for _ in range(NUM_VISITS):
                await visit(frontend.servers.address, path)
            await asyncio.sleep(10 * DELAY_S)
    assert [] == [line for line in lines if line["event"] == "call_broken"]


NUM_VISITS, CALLS_EACH = 100, 30


async def visit(address: str, path: bytes) -> None:
    """Make calls with a name that is not known on one connection, and go."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    message = UNKNOWN_REQUEST.SerializeToString()
    body = bytes(1) + len(message).to_bytes(4, "big") + message
    sent = [Frame(SETTINGS)]
    for stream in range(1, 2 * CALLS_EACH, 2):
        sent.append(Frame(HEADERS, END_HEADERS, stream, header_block(call_headers(path))))
        sent.append(Frame(DATA, END_STREAM, stream, body))
    writer.write(PREFACE + encode(sent))
    await writer.drain()
    await asyncio.sleep(0.003 * random.random())
    writer.transport.abort()


async def first_of(call):
    """Return the first status of a Watch, or the error that it ends with."""
    try:
        return (await call.read()).status
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


@asynccontextmanager
async def watching(
    health: HealthServicer, watchers: list[Watcher]
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Have each of these watch during the block."""
    watches = [asyncio.create_task(health.Watch(REQUEST, watcher)) for watcher in watchers]
    for watcher in watchers:
        assert SERVING == await within(watcher.statuses.get())
    yield watches
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)


@pytest.fixture
def health() -> HealthServicer:
    servicer = HealthServicer()
    servicer.set(REQUEST.service, True)
    return servicer
