"""Raw TCP connections to every port, many at a time, and real requests in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import grpc
import httpx

from tests.faults.fuzz.judge import LIMIT_S, End, Outcome, Verdict, judge
from tests.faults.fuzz.tcp import http1, http2
from tests.faults.fuzz.tcp.case import Manner, TcpCase
from tests.faults.fuzz.tcp.frames import is_answered
from tests.faults.fuzz.tcp.recording import CALLS, call, record

CASES_PER_PROBE = 2_000
NUM_LEFT_OPEN = 300
"""Connections that stay open; the oldest is closed for a new one."""
ANSWER_S = 0.5
"""Longest wait for an answer before this side of a connection is ended, seconds."""
PAUSE_S = 0.01
MAX_KEPT_BYTES = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with time 0: closing sends RST."""
MANNERS = (*[Manner.FINISH] * 7, Manner.RESET, Manner.DRIP, Manner.LEAVE_OPEN)


async def run_tcp(addresses: Mapping[str, str], *, count: int, seed: int) -> Outcome:
    """
    Attack every port, and make a real request at each after every `CASES_PER_PROBE` cases.

    Args:
        addresses: Address of each port: `http` and `metrics` speak HTTP/1.1, the others gRPC.
        count: Number of cases.
        seed: Seed of the cases.
    """
    cases = draw_cases(addresses, await record(addresses), random.Random(seed))
    outcome = Outcome()
    for begin in range(0, count, CASES_PER_PROBE):
        some = itertools.islice(cases, min(CASES_PER_PROBE, count - begin))
        outcome.add(await attack(addresses, some))
        for port in await find_broken(addresses):
            outcome.fail(f"no real request after case {begin + CASES_PER_PROBE}: {port}")
    return outcome


def draw_cases(
    ports: Iterable[str], recorded: Mapping[str, list[bytes]], draw: random.Random
) -> Iterator[TcpCase]:
    """Draw cases for ports without end."""
    ports = list(ports)
    valid = {"http": http1.GATEWAY, "metrics": http1.METRICS}
    while True:
        port = draw.choice(ports)
        if port in valid:
            name, raw = http1.attack(valid[port], draw)
        else:
            path = CALLS[port][0][0].encode()
            name, raw = http2.attack(recorded[port], path, draw)
        yield TcpCase(port, name, raw, is_stream=False, manner=draw.choice(MANNERS))


async def attack(addresses: Mapping[str, str], cases: Iterable[TcpCase]) -> Outcome:
    """Send cases, each on a connection of its own."""
    open_ones: deque[asyncio.Transport] = deque()

    async def send(case: object, limit_s: float) -> End:
        one = cast("TcpCase", case)
        return await send_case(addresses[one.port], one, limit_s, open_ones)

    try:
        return await judge(cases, send)
    finally:
        for transport in open_ones:
            transport.abort()


async def find_broken(addresses: Mapping[str, str]) -> list[str]:
    """Make a real request at each port; return what is wrong with those that do not serve it."""
    broken = []
    async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
        for port, address in addresses.items():
            try:
                if port in CALLS:
                    await call(address, *CALLS[port][0])
                    continue
                page = await client.get(f"http://{address}/metrics")
                if not page.is_success or b"tandem" not in page.content:
                    broken.append(f"{port}: {page.status_code}")
            except (grpc.aio.AioRpcError, httpx.HTTPError) as error:
                broken.append(f"{port}: {error!r}")
    return broken


class _Connection(asyncio.Protocol):
    """
    One connection to a server, and the beginning of what the server sent.

    Attributes:
        answered: Set when the reply shows that the beginning was decoded, or the connection ends.
        closed: Set when the connection ends.
        reply: The first bytes of the server.
    """

    def __init__(self, is_decoded: Callable[[bytes], bool]) -> None:
        self._is_decoded = is_decoded
        self.answered, self.closed = asyncio.Event(), asyncio.Event()
        self.reply = bytearray()

    def data_received(self, data: bytes) -> None:
        if len(self.reply) < MAX_KEPT_BYTES:
            self.reply += data
            if self.is_decoded():
                self.answered.set()

    def connection_lost(self, exc: Exception | None) -> None:  # how it ends is the server's choice
        self.answered.set()
        self.closed.set()

    def is_decoded(self) -> bool:
        """Return whether the server decoded the beginning of what was sent."""
        return self._is_decoded(bytes(self.reply))


def _is_http1_decoded(reply: bytes) -> bool:
    """Return whether an answer is there, and not the refusal of what is no HTTP."""
    words = reply.split(b" ", 2)
    return len(words) > 2 and words[0].startswith(b"HTTP/1") and words[1] != b"400"


async def send_case(
    address: str,
    case: TcpCase,
    limit_s: float,
    open_ones: deque[asyncio.Transport] | None = None,
) -> End:
    """
    Send one case and judge how its connection ends.

    Args:
        address: Address of the port.
        case: What to send, and how.
        limit_s: Deadline of connecting, and of the server's closing, seconds.
        open_ones: Connections that stay open, which one of this manner joins.
    """
    host, _, port = address.rpartition(":")
    check = is_answered if case.port in CALLS else _is_http1_decoded
    try:
        async with asyncio.timeout(limit_s):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(check), host, int(port)
            )
    except TimeoutError:
        return End("not accepted", Verdict.SUSPECT, is_decoded=False)
    except OSError as error:  # refused, or this side has no port left
        return End(type(error).__name__, Verdict.SUSPECT, is_decoded=False)
    try:
        name = await _use(transport, connection, case, limit_s, open_ones)
    except TimeoutError:
        transport.abort()
        return End("not closed", Verdict.SUSPECT, is_decoded=connection.is_decoded())
    return End(name, is_decoded=connection.is_decoded())


async def _use(
    transport: asyncio.Transport,
    connection: _Connection,
    case: TcpCase,
    limit_s: float,
    open_ones: deque[asyncio.Transport] | None,
) -> str:
    """
    Return how the connection ended.

    Raises:
        TimeoutError: The server does not close a connection whose other side has ended.
    """
    await _write(transport, case)
    try:
        async with asyncio.timeout(ANSWER_S):
            await connection.answered.wait()
    except TimeoutError:
        pass  # bytes that end in the middle of a request get no answer
    if case.manner is Manner.LEAVE_OPEN and open_ones is not None:
        open_ones.append(transport)
        if len(open_ones) > NUM_LEFT_OPEN:
            open_ones.popleft().abort()
        return "left open"
    if case.manner is Manner.RESET:
        own: socket.socket = transport.get_extra_info("socket")
        if not transport.is_closing():
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()
        return "reset"
    with contextlib.suppress(OSError):  # the server has reset it, and the loop has yet to see that
        if not transport.is_closing():
            transport.write_eof()
    async with asyncio.timeout(limit_s):
        await connection.closed.wait()
    return "closed"


async def _write(transport: asyncio.Transport, case: TcpCase) -> None:
    if case.manner is not Manner.DRIP:
        transport.write(case.raw)
        return
    size = max(1, len(case.raw) // 8)
    for at in range(0, len(case.raw), size):
        if transport.is_closing():
            return
        transport.write(case.raw[at : at + size])
        await asyncio.sleep(PAUSE_S)
