"""Memory of calls whose clients go while gRPC's core works for them."""

from __future__ import annotations

import asyncio
import ctypes
import gc

import grpc
import pytest
import uvloop

from scheduler_svc.frontend.calls.batches import let_reads_end
from scheduler_svc.frontend.calls.screened_server import screened_server
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
NUM_LOOKS = 20
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


class Reader:
    """A service whose calls read until their clients end or go."""

    def __init__(self) -> None:
        self.begun = self.left = 0

    async def read(self, requests, _context):
        self.begun += 1
        try:
            async for _ in requests:
                pass
            await asyncio.Event().wait()
        finally:
            self.left += 1

    def handlers(self):
        return {"Read": grpc.stream_stream_rpc_method_handler(self.read)}


async def open_calls_and_go(port: int, path: bytes) -> None:
    """Open calls that send nothing on one connection, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    block = header_block(call_headers(path))
    heads = [Frame(HEADERS, END_HEADERS, 2 * at + 1, block) for at in range(CALLS_EACH)]
    writer.write(PREFACE + encode([Frame(SETTINGS), *heads]))
    writer.write_eof()
    await reader.read()
    writer.close()


async def calls_leave_nothing(path: bytes) -> bool:
    """Return whether the heap is as it was, soon after thousands of calls of this path."""
    let_reads_end(asyncio.get_running_loop())
    served = Reader()
    server = screened_server((), (), Gate(), ())
    server.add_registered_method_handlers("tests.Left", served.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def play(num_connections: int) -> None:
        for _ in range(num_connections):
            await open_calls_and_go(port, path)
        await until(lambda: served.left == served.begun)

    await play(NUM_CONNECTIONS // 2)
    await asyncio.sleep(1)  # what is freed late is no part of what was there before
    most = bytes_in_use() + NUM_CONNECTIONS * CALLS_EACH * MAX_BYTES_A_CALL
    await play(NUM_CONNECTIONS)
    for _ in range(NUM_LOOKS):
        await asyncio.sleep(0.5)
        if bytes_in_use() < most:
            break
    is_back = bytes_in_use() < most
    await server.stop(0)
    return is_back


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("path", [b"/tests.Left/Read", b"/tests.Left/Nothing"])
def test_calls_whose_client_goes_leave_no_memory(path, make):
    """
    Thousands of calls, of a method that reads and of one that there is not, whose client goes in
    the middle: what gRPC's core allocated for them is freed.
    """
    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(calls_leave_nothing(path))
