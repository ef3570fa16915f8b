"""Calls that a frontend's server answers or hands on: by their method, and in their turn."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import grpc
import pytest

from scheduler_svc.frontend.calls.screened_server import NUM_POSTED, screened_server
from tandem.errors import HandedOver
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.status import from_rpc_error
from tests.faults.fuzz.tcp.frames import (
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    Frame,
    call_headers,
    encode,
    header_block,
)
from tests.scheduler_svc.frontend.fake_core import Frontend, until, within


async def send_path(address: str, path: bytes) -> None:
    """Open a connection, call a method by these bytes, and read until something is answered."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = Frame(HEADERS, END_HEADERS, 1, header_block(call_headers(path)))
    writer.write(PREFACE + encode([Frame(SETTINGS), head]))
    await within(reader.readuntil(b"Method not found!"))
    writer.close()


async def serves(frontend: Frontend) -> bool:
    stub = InferenceServiceStub(frontend.channel)
    answer = await within(stub.GetModel(model_pb2.GetModelRequest()))
    return bool(answer.model.name)


@pytest.mark.parametrize(
    "path", [b"/tandem\xed/GetModel", b"\xff", b"/tandem.inference.v1.InferenceService/Nothing"]
)
async def test_unknown_method_is_answered_and_the_port_serves_on(frontend, path):
    """
    A call of a method that there is not, though its name be no text, is UNIMPLEMENTED, at either
    port; other calls are served as before.
    """
    servers = frontend.servers
    for address in (servers.address, servers.admin_address):
        for _ in range(3):
            await send_path(address, path)
    assert await serves(frontend)


async def test_client_hears_that_a_method_is_unknown(frontend):
    """
    A client newer than the server gets UNIMPLEMENTED in gRPC's own words.
    """
    call = frontend.channel.unary_unary(
        "/tandem.inference.v1.InferenceService/Newer",
        request_serializer=pb.AbortRequest.SerializeToString,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(call(pb.AbortRequest()))
    assert grpc.StatusCode.UNIMPLEMENTED == caught.value.code()
    assert "Method not found!" == caught.value.details()
    assert await serves(frontend)


METHOD = "/tests.Turns/Take"


class Gate:
    """A gate that the test opens; callers name themselves in the metadata."""

    def __init__(self) -> None:
        self.callers: list[str] = []
        """Callers of all calls, in the order in which they came."""
        self._is_open = False
        self._waiting: list[Callable[[], None]] = []

    def open(self) -> None:
        self._is_open = True
        for changed in self._waiting:
            changed()

    def caller_of(self, context) -> str:
        (caller,) = [value for key, value in context.invocation_metadata() if key == "caller"]
        self.callers.append(caller)
        return caller

    def may_begin(self, _caller: object, _method: str) -> bool:
        return self._is_open

    def notify(self, changed: Callable[[], None]) -> None:
        self._waiting.append(changed)


class TestTurns:
    NUM_GREEDY = 600
    NUM_OTHERS = 64
    """Least number of calls that is too many beside those that the server waits for."""

    @pytest.fixture
    async def waiting(self):
        """
        Yield a server whose gate is closed, the order in which it serves, and calls that wait.
        """
        gate, served = Gate(), []

        async def take(caller: bytes, _context) -> bytes:
            served.append(caller)
            return caller

        handler = grpc.unary_unary_rpc_method_handler(take)
        server = screened_server((), (), gate, {METHOD})
        server.add_registered_method_handlers("tests.Turns", {"Take": handler})
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(METHOD)
            calls = []
            for caller, count in (("greedy", self.NUM_GREEDY), ("polite", 1)):
                calls.extend(
                    call(caller.encode(), metadata=(("caller", caller),)) for _ in range(count)
                )
                await until(lambda: len(gate.callers) == len(calls))
            yield server, gate, served, calls
        await server.stop(0)

    async def test_caller_with_one_call_does_not_wait_for_hundreds(self, waiting):
        """
        Behind hundreds of calls of another caller, one that came last is served second, and each of
        the others once.
        """
        _server, gate, served, calls = waiting
        assert "polite" == gate.callers[-1]
        assert [] == served
        gate.open()
        await within(asyncio.gather(*calls))
        assert [b"greedy", b"polite"] == served[:2]
        assert [b"greedy"] * (self.NUM_GREEDY - 1) == served[2:]

    async def test_calls_that_wait_when_the_server_stops_are_refused_with_a_reason(self, waiting):
        """
        Each call whose turn has not come ends with HANDED_OVER, which says when to call again.
        """
        server, _gate, served, calls = waiting
        await server.stop(30)
        ends = await within(asyncio.gather(*calls, return_exceptions=True))
        errors = [from_rpc_error(end) for end in ends]
        assert {HandedOver} == {type(error) for error in errors}
        assert all(error.retry_after_s for error in errors)
        assert [] == served

    @pytest.mark.slow
    async def test_call_that_has_ended_is_not_kept(self, waiting):
        """
        A call and its message are freed when the call has ended, whether or not others follow.
        """
        _server, gate, _served, calls = waiting
        gate.open()
        await within(asyncio.gather(*calls))

        def are_freed() -> bool:
            gc.collect()
            return num_live_calls() < NUM_POSTED + self.NUM_OTHERS

        await until(are_freed)


def num_live_calls() -> int:
    """
    Return the number of calls that grpc.aio's servers hold, with those that they wait for:
    `NUM_POSTED` of METHOD, and one of unknown methods.
    """
    return sum(type(one).__name__ == "RPCState" for one in gc.get_objects())
