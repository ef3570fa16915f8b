"""Memory of calls whose clients go while gRPC's core works for them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

import grpc
import pytest
import uvloop

from scheduler_svc.frontend.calls.interceptor import ErrorInterceptor
from scheduler_svc.frontend.calls.rpc_handlers import abort
from scheduler_svc.frontend.calls.screened_server import screened_server
from tandem.errors import InvalidParameter, Unauthenticated
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
from tests.scheduler_svc.frontend.fake_core import until

NUM_CONNECTIONS, CALLS_EACH = 40, 90
MAX_BYTES_A_CALL = 40
"""A batch that is not freed costs 96 bytes and more."""
NUM_LOOKS = 50
"""Looks at the heap until all calls have ended."""


HEAP_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in HEAP_FIELDS)


def bytes_in_use() -> int:
    gc.collect()
    told = ctypes.CDLL(None).mallinfo2
    told.restype = Heap
    return told().uordblks


class Gate:
    """A gate that lets every call begin."""

    def caller_of(self, _context):
        return ""

    def may_begin(self, _caller, _method):
        return True

    def notify(self, changed):
        changed()


class Handlers:
    """
    Handlers of calls, each of which waits for what its client never sends.

    Attributes:
        begun: Calls that have begun.
        left: Calls that are over.
    """

    def __init__(self) -> None:
        self.begun = self.left = 0

    @contextlib.contextmanager
    def counted(self):
        self.begun += 1
        try:
            yield
        finally:
            self.left += 1

    async def wait(self, requests, _context):
        with self.counted():
            async for _ in requests:
                pass
            await asyncio.Event().wait()

    async def end(self, requests, _context):
        with self.counted():
            async for _ in requests:
                pass

    async def refuse(self, requests, _context):
        with self.counted():
            async for _ in requests:
                pass
            raise InvalidParameter("no request came.", field="request")

    async def turn_away(self, _requests, context):
        with self.counted():
            await abort(context, Unauthenticated("who calls?"))

    def by_method(self):
        named = {"Wait": self.wait, "End": self.end}
        named |= {"Refuse": self.refuse, "TurnAway": self.turn_away}
        return {
            name: grpc.stream_stream_rpc_method_handler(handle) for name, handle in named.items()
        }


async def open_calls_and_go(port: int, path: bytes) -> None:
    """Open calls that send nothing on one connection, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    block = header_block(call_headers(path))
    heads = [Frame(HEADERS, END_HEADERS, 2 * at + 1, block) for at in range(CALLS_EACH)]
    writer.write(PREFACE + encode([Frame(SETTINGS), *heads]))
    writer.write_eof()
    await reader.read()
    writer.close()


async def started_server(handlers: Handlers) -> tuple[grpc.aio.Server, int]:
    server = screened_server((ErrorInterceptor(),), (), Gate(), ())
    server.add_registered_method_handlers("tests.Left", handlers.by_method())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def calls_leave_nothing(path: bytes) -> bool:
    """Return whether the heap is as it was, soon after thousands of calls of this path."""
    served = Handlers()
    server, port = await started_server(served)

    async def play(num_connections: int) -> None:
        for _ in range(num_connections):
            await open_calls_and_go(port, path)
        await until(lambda: served.left == served.begun)

    await play(NUM_CONNECTIONS // 2)
    await asyncio.sleep(1)  # what is freed late is no part of what was there before
    most = bytes_in_use() + NUM_CONNECTIONS * CALLS_EACH * MAX_BYTES_A_CALL
    await play(NUM_CONNECTIONS)
    for _ in range(NUM_LOOKS):
        await asyncio.sleep(0.2)
        if bytes_in_use() < most:
            break
    is_back = bytes_in_use() < most
    await server.stop(0)
    return is_back


METHODS = ("Wait", "End", "Refuse", "TurnAway", "Nothing")
LOOPS = pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])


@pytest.mark.parametrize(
    ("method", "make"),
    [
        *((method, uvloop.new_event_loop) for method in METHODS),
        *((method, asyncio.new_event_loop) for method in ("Wait", "TurnAway")),
    ],
)
def test_calls_whose_client_goes_leave_no_memory(method, make):
    """
    Thousands of calls whose client goes in the middle, of methods that wait on, end, refuse what did
    not come or turn all away, and of one that there is not: their batches are freed. So they are on
    the other loop for a call that has begun, and for one that never does.
    """
    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(calls_leave_nothing(f"/tests.Left/{method}".encode()))


@LOOPS
def test_loop_may_end_right_after_a_server_with_calls(make):
    """
    A server is stopped while a client is in a call, and its loop is closed at once: nothing raises.
    """

    async def stop_with_a_call() -> None:
        served = Handlers()
        server, port = await started_server(served)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/tests.Left/Wait")()
            await until(lambda: served.begun)
            await server.stop(0)
            call.cancel()

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(stop_with_a_call())
