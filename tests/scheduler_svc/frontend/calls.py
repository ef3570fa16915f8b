"""Readers of the answers to calls."""

import grpc
import pytest

from tandem.errors import TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.status import from_rpc_error
from tests.scheduler_svc.frontend.fake_core import Frontend, within


def stub_of(frontend: Frontend) -> InferenceServiceStub:
    return InferenceServiceStub(frontend.channel)


async def rest_of(call) -> list[pb.GenerateResponse]:
    """Return all messages that still come; raise the error that the stream ends with."""
    found = []
    while (message := await within(call.read())) is not grpc.aio.EOF:
        found.append(message)
    return found


async def error_of(call) -> TandemError:
    """Return the typed error that a stream or a unary call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rest_of(call) if isinstance(call, grpc.aio.UnaryStreamCall) else within(call))
    return from_rpc_error(caught.value)


def kinds(messages: list[pb.GenerateResponse]) -> list[str | None]:
    return [message.WhichOneof("event") for message in messages]
