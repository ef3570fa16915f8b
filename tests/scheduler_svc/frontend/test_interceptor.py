"""The outermost interceptor, around handlers of all four kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
import structlog
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass, GetMessageClassesForFiles
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from scheduler_svc.frontend.calls.interceptor import ErrorInterceptor
from tandem.admin.v1.admin_service_pb2 import ConfigEntry
from tandem.errors import ERROR_BY_REASON, Draining
from tandem.status import from_rpc_error
from tests.scheduler_svc.frontend.fake_core import within

WRAP = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
NOT_UTF8 = b"\x0a\x02\xff\xfe"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


async def fails_typed(request, context):
    raise Draining("no more")


async def fails_by_a_bug(request, context):
    raise KeyError("bug")


async def yields_then_fails(request, context):
    yield ConfigEntry(name="first")
    raise Draining("no more")


async def names_of(requests, context):
    async for request in requests:
        await context.write(ConfigEntry(name=request.name))


@asynccontextmanager
async def served(kind: str, behavior: Callable) -> AsyncIterator[Callable]:
    """Yield a multicallable, whose requests are bytes, of a server with one method."""
    handler = WRAP[kind](
        behavior,
        request_deserializer=ConfigEntry.FromString,
        response_serializer=ConfigEntry.SerializeToString,
    )
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield getattr(channel, kind)("/S/M", response_deserializer=ConfigEntry.FromString)
    finally:
        await server.stop(0)


async def several(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def outcome(kind: str, call: Callable, *requests: bytes) -> tuple[list[str], str]:
    """Return the names of the responses, and the reason that the call ended with."""
    calling = call(several(*requests) if kind.startswith("stream") else requests[0])
    names: list[str] = []

    async def read() -> None:
        if kind.endswith("unary"):
            await within(calling)
            return
        while (message := await within(calling.read())) is not grpc.aio.EOF:
            names.append(message.name)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    return names, from_rpc_error(caught.value).reason


class TestEveryKind:
    @pytest.mark.parametrize("kind", WRAP)
    async def test_typed_error_keeps_its_reason(self, kind):
        """
        A TandemError that a handler raises is the status of its call.
        """
        async with served(kind, fails_typed) as call:
            assert ([], "DRAINING") == await outcome(kind, call, b"")

    @pytest.mark.parametrize("kind", WRAP)
    async def test_bug_is_internal(self, kind):
        """
        Any other exception is INTERNAL, with a reason.
        """
        async with served(kind, fails_by_a_bug) as call:
            assert ([], "INTERNAL") == await outcome(kind, call, b"")

    @pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
    async def test_undecodable_request_is_refused(self, kind):
        """
        Bytes that are no message of the contract are INVALID_PARAMETER.
        """
        async with served(kind, fails_by_a_bug) as call:
            assert ([], "INVALID_PARAMETER") == await outcome(kind, call, NOT_UTF8)


class TestStreamsOfRequests:
    async def test_undecodable_request_ends_the_stream(self):
        """
        Requests before one that cannot be decoded are served; that one is INVALID_PARAMETER.
        """
        async with served("stream_stream", names_of) as call:
            good = ConfigEntry(name="good").SerializeToString()
            found = await outcome("stream_stream", call, good, NOT_UTF8)
            assert (["good"], "INVALID_PARAMETER") == found

    @pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
    async def test_generator_of_responses_is_guarded(self, kind):
        """
        A handler that yields its responses is served, and its error has its reason.
        """
        async with served(kind, yields_then_fails) as call:
            assert (["first"], "DRAINING") == await outcome(kind, call, b"")

    async def test_reflection_refuses_what_it_cannot_decode(self, frontend):
        """
        Undecodable bytes to reflection are INVALID_PARAMETER, as everywhere; good ones are answered.
        """
        stub = reflection_pb2_grpc.ServerReflectionStub(frontend.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await within(stub.ServerReflectionInfo(iter([asked])).read())
        assert "tandem.inference.v1.InferenceService" in {
            one.name for one in answer.list_services_response.service
        }
        newer = frontend.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        assert answer == await within(newer(iter([asked])).read())
        raw = frontend.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        error = await error_of_stream(raw(several(NOT_UTF8)))
        assert "INVALID_PARAMETER" == error.reason


async def error_of_stream(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(call.read())
    return from_rpc_error(caught.value)


REFLECTIONS = [f"/grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]
ERRORS_FILE = "tandem/common/v1/errors.proto"


async def reflected(channel: grpc.aio.Channel, service: str, symbol: str) -> DescriptorPool:
    """Return the file that reflection knows of a symbol, with all that it imports."""
    ask = channel.stream_stream(
        f"{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    pool, known = DescriptorPool(), set[str]()

    async def learn(**what: str) -> None:
        asked = reflection_pb2.ServerReflectionRequest(**what)
        answer = await within(ask(iter([asked])).read())
        for encoded in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(encoded)
            for name in {*file.dependency} - known:
                await learn(file_by_filename=name)
            if file.name not in known:
                known.add(file.name)
                pool.Add(file)

    await learn(file_containing_symbol=symbol)
    return pool


class TestReasonsByReflection:
    @pytest.mark.parametrize("service", REFLECTIONS)
    async def test_every_reason_that_is_sent_is_a_value_of_the_enum(self, frontend, service):
        """
        A client that has nothing but reflection sees the reason of each class that can be sent as
        a value of ErrorReason, and no value that no class has.
        """
        pool = await reflected(frontend.channel, service, "tandem.common.v1.ErrorReason")
        names = set(pool.FindEnumTypeByName("tandem.common.v1.ErrorReason").values_by_name)
        sent = {f"ERROR_REASON_{reason}" for reason in ERROR_BY_REASON}
        assert {"ERROR_REASON_UNSPECIFIED", *sent} == names

    @pytest.mark.parametrize("service", REFLECTIONS)
    async def test_every_rpc_tells_its_reasons(self, frontend, service):
        """
        Reflection of the service reaches the enum: the option of each rpc has values of it, each once.
        """
        name = "tandem.inference.v1.InferenceService"
        pool = await reflected(frontend.channel, service, name)
        GetMessageClassesForFiles([ERRORS_FILE], pool)  # makes the option known to messages
        options = GetMessageClass(pool.FindMessageTypeByName("google.protobuf.MethodOptions"))
        option = pool.FindExtensionByName("tandem.common.v1.reasons")
        enum = pool.FindEnumTypeByName("tandem.common.v1.ErrorReason")
        for method in pool.FindServiceByName(name).methods:
            encoded = method.GetOptions().SerializeToString()
            numbers = options.FromString(encoded).Extensions[option].reasons
            told = {enum.values_by_number[number].name for number in numbers}
            assert told, method.name
            assert len(told) == len(numbers)


class TestTrace:
    @pytest.mark.parametrize(
        ("traceparent", "expected"),
        [
            (f"00-{TRACE_ID}-00f067aa0ba902b7-01", TRACE_ID),
            (f"00-{TRACE_ID}-00f067aa0ba902b7-01 ", None),
            (TRACE_ID, None),
        ],
        ids=["valid", "space", "id-alone"],
    )
    async def test_log_has_the_id_of_the_callers_trace(self, traceparent, expected):
        """
        The id in a valid traceparent stands in lines about the call; tracestate is not read.
        """
        structlog.reset_defaults()
        metadata = (("traceparent", traceparent), ("tracestate", "vendor=opaque"))
        async with served("unary_unary", fails_typed) as call:
            failing = call(b"", metadata=metadata)
            with (
                capture_logs(processors=[merge_contextvars]) as logged,
                pytest.raises(grpc.aio.AioRpcError),
            ):
                await within(failing)
        (line,) = logged
        assert ("call_failed", expected) == (line["event"], line.get("trace_id"))
        assert "opaque" not in str(line)
