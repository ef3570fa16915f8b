"""Options of a frontend's gRPC servers, as a client notices them."""

from __future__ import annotations

import asyncio

import grpc

from scheduler_svc.frontend.intake.grpc_options import server_options
from scheduler_svc.process.frontend_settings import FrontendSettings
from tests.scheduler_svc.frontend.fake_core import within


class Lingering:
    """Calls that go on in the server after their clients left, until they may end."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[bytes] = asyncio.Queue()
        self.may_end = asyncio.Event()

    async def linger(self, request: bytes, _context: object) -> bytes:
        self.begun.put_nowait(request)
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()
        return request


async def test_calls_that_left_take_no_stream_of_their_connection():
    """
    A frontend that is behind with the ends of cancelled calls serves the next one of the same
    connection: gRPC does not refuse it without a reason.
    """
    calls = Lingering()
    settings = FrontendSettings(index=0, ipc_path="", listen="", max_streams_per_connection=1)
    server = grpc.aio.server(options=server_options(settings))
    handler = grpc.unary_unary_rpc_method_handler(calls.linger)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary("/S/M")
            for number in range(4):
                gone = method(bytes([number]))
                assert bytes([number]) == await within(calls.begun.get())
                gone.cancel()
            last = method(b"last")
            assert b"last" == await within(calls.begun.get())
            calls.may_end.set()
            assert b"last" == await within(last)
    finally:
        calls.may_end.set()
        await server.stop(0)
