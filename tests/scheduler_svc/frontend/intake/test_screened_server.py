"""Calls of methods that a frontend does not have, by whatever bytes they are named."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
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
from tests.scheduler_svc.frontend.fake_core import Frontend, within


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
