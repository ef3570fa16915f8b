"""Recordings of what the client of gRPC sends on whole connections, made between it and a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import grpc

from tandem.inference.v1.inference_service_pb2 import CompleteRequest, GenerateRequest
from tests.faults.fuzz.judge import LIMIT_S

GET_MODEL = "/tandem.inference.v1.InferenceService/GetModel"
GET_STATS = "/tandem.admin.v1.AdminService/GetStats"
DESCRIBE = "/tandem.executor.v1.ExecutorService/Describe"

_REQUEST = GenerateRequest(text="hello")
_REQUEST.stopping.max_tokens = 2
CALLS: Mapping[str, Sequence[tuple[str, bytes]]] = {
    "public": (
        (GET_MODEL, b""),
        (
            "/tandem.inference.v1.InferenceService/Complete",
            CompleteRequest(request=_REQUEST).SerializeToString(),
        ),
        ("/tandem.inference.v1.InferenceService/Generate", _REQUEST.SerializeToString()),
        ("/grpc.health.v1.Health/Check", b""),
    ),
    "admin": ((GET_STATS, b""), ("/tandem.admin.v1.AdminService/GetConfig", b"")),
    "executor": ((DESCRIBE, b""), ("/grpc.health.v1.Health/Check", b"")),
}
"""Real calls of each port that speaks gRPC; each ends OK."""


async def record(addresses: Mapping[str, str]) -> dict[str, list[bytes]]:
    """Make the calls of each port, each on a connection of its own; return the bytes sent."""
    return {
        port: [await _recorded(addresses[port], method, raw) for method, raw in calls]
        for port, calls in CALLS.items()
    }


async def call(address: str, method: str, raw: bytes, limit_s: float = LIMIT_S) -> None:
    """
    Make one call on a connection of its own.

    Raises:
        grpc.aio.AioRpcError: It does not end OK.
    """
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        async for _ in channel.unary_stream(method)(raw, timeout=limit_s, wait_for_ready=True):
            pass


async def _recorded(address: str, method: str, raw: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    sent = bytearray()

    async def connected(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        server, request = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pump(client, request, sent), _pump(server, answer, bytearray()))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as proxy:
        here = proxy.sockets[0].getsockname()[1]
        await call(f"127.0.0.1:{here}", method, raw)
    return bytes(sent)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
) -> None:
    with contextlib.suppress(OSError):  # either end may be gone
        while piece := await reader.read(65_536):
            seen += piece
            writer.write(piece)
            await writer.drain()
    writer.close()
