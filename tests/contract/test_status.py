"""Errors as gRPC statuses: one side raises an error, the other side can raise it again."""

from __future__ import annotations

import socket
import threading
from concurrent import futures

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.error_codes import ERROR_BY_CODE, ResourceExhausted, TandemError
from tandem.errors import ERROR_BY_REASON, InternalError, InvalidParameter, QueueFull
from tandem.status import (
    CallCancelled,
    PeerUnavailable,
    from_rpc_error,
    from_status_proto,
    to_grpc_status,
    to_status_proto,
)

QUICK = settings(max_examples=40, deadline=None)
ERRORS = st.builds(
    lambda cls, **changes: cls(**changes),
    st.sampled_from(sorted(ERROR_BY_REASON.values(), key=lambda cls: cls.reason)),
    message=st.text(),
    field=st.none() | st.text(min_size=1),
    retry_after_s=st.none() | st.integers(0, 10**6).map(lambda ms: ms / 1000),
    metadata=st.dictionaries(st.text(), st.text(), max_size=3),
)


def facts(error: TandemError) -> tuple:
    """Return what a caller can see of an error."""
    retry = None if error.retry_after_s is None else round(error.retry_after_s, 6)
    return type(error), error.message, error.field, retry, error.metadata


def details_of(status: status_pb2.Status) -> set[str]:
    return {detail.type_url.rsplit(".", 1)[1] for detail in status.details}


class TestStatusProto:
    @QUICK
    @given(ERRORS)
    def test_error_survives_the_journey(self, error):
        """
        An error arrives with its class, message, field, retry time and metadata.
        """
        assert facts(error) == facts(from_status_proto(to_status_proto(error)))

    def test_reason_travels_as_error_info(self):
        """
        The ErrorInfo of an error has the reason's name without prefix and the domain "tandem".
        """
        status = to_status_proto(QueueFull("full", metadata={"limit": "max_num_seqs"}))
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert ("QUEUE_FULL", "tandem") == (info.reason, info.domain)
        assert {"limit": "max_num_seqs"} == dict(info.metadata)
        assert code_pb2.RESOURCE_EXHAUSTED == status.code

    def test_field_travels_as_bad_request(self):
        """
        An error with a field has a BadRequest naming it, one without has none.
        """
        assert {"ErrorInfo", "BadRequest"} == details_of(
            to_status_proto(InvalidParameter("bad", field="sampling.top_p"))
        )
        assert {"ErrorInfo"} == details_of(to_status_proto(InvalidParameter("bad")))

    def test_retry_time_travels_as_retry_info(self):
        """
        An error with a retry time has a RetryInfo.
        """
        assert {"ErrorInfo", "RetryInfo"} == details_of(to_status_proto(QueueFull("full")))

    def test_foreign_domain_is_not_ours(self):
        """
        A status with an ErrorInfo of another domain carries no reason of ours.
        """
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="example.com"))
        assert from_status_proto(status_pb2.Status(code=8, details=[packed])) is None

    def test_reason_of_a_newer_version_keeps_its_code(self):
        """
        A reason that only a newer peer knows is rebuilt with its name, its code and its message.
        """
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason="NEW_ONE", domain="tandem"))
        rebuilt = from_status_proto(
            status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="hm", details=[packed])
        )
        assert ("NEW_ONE", "RESOURCE_EXHAUSTED", "hm") == (
            rebuilt.reason,
            rebuilt.code,
            rebuilt.message,
        )
        assert isinstance(rebuilt, ResourceExhausted)

    @pytest.mark.parametrize("code", ERROR_BY_CODE)
    def test_reason_of_a_newer_version_is_of_the_class_of_its_code(self, code):
        """
        A reason that only a newer peer knows is matched by the class of its code, and UNAVAILABLE
        advises a retry even without RetryInfo.
        """
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason="NEW_ONE", domain="tandem"))
        number = code_pb2.Code.Value(code)
        rebuilt = from_status_proto(status_pb2.Status(code=number, details=[packed]))
        assert isinstance(rebuilt, ERROR_BY_CODE[code])
        assert ("NEW_ONE", code) == (rebuilt.reason, rebuilt.code)
        assert (code == "UNAVAILABLE") == (rebuilt.retry_after_s is not None)

    def test_second_error_info_of_a_proxy_does_not_hide_ours(self):
        """
        A proxy that adds its own ErrorInfo behind ours leaves ours in force.
        """
        status = to_status_proto(QueueFull("full"))
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="example.com"))
        assert QueueFull is type(from_status_proto(status))

    @pytest.mark.parametrize("reason", ["", "NEW_ONE"])
    def test_reason_without_a_code_is_internal(self, reason):
        """
        A status without a reason, or without a usable code, is an InternalError with its message.
        """
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="tandem"))
        rebuilt = from_status_proto(status_pb2.Status(message="hm", details=[packed]))
        assert (InternalError, "hm") == (type(rebuilt), rebuilt.message)


class _Raises(grpc.GenericRpcHandler):
    """A server that ends every call as the test says."""

    def __init__(self) -> None:
        self.ending = lambda context: None

    def service(self, _details):
        def call(_request, context):
            self.ending(context)
            return b""

        return grpc.unary_unary_rpc_method_handler(call)


@pytest.fixture(scope="module")
def served():
    """
    Yield a function that ends a call over a real channel in a given way and rebuilds the error.
    """
    handler = _Raises()
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def error_of(ending) -> TandemError:
        handler.ending = ending
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/test/Call")(b"", timeout=60)
        return from_rpc_error(raised.value)

    yield error_of
    channel.close()
    server.stop(None).wait()


def drop_first_stream(listener: socket.socket, code: int) -> None:
    """Speak just enough HTTP/2 to reset the first stream of a connection."""
    settings, headers, rst_stream = 4, 1, 3

    def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
        head = len(payload).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big")
        return head + payload

    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as reader:
        reader.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        connection.sendall(frame(settings, 0))
        while head := reader.read(9):
            reader.read(int.from_bytes(head[:3], "big"))
            if head[3] == headers:
                stream = int.from_bytes(head[5:], "big")
                connection.sendall(frame(rst_stream, stream, code.to_bytes(4, "big")))


class TestOverGrpc:
    @pytest.mark.parametrize("reason", sorted(ERROR_BY_REASON))
    def test_every_error_crosses_a_real_channel(self, served, reason):
        """
        A server's abort is rebuilt on the client's side as the same error.
        """
        error = ERROR_BY_REASON[reason](
            "what was wrong: ümlaut, and what to do", field="a.b[0]", metadata={"key": "value"}
        )
        rebuilt = served(lambda context: context.abort_with_status(to_grpc_status(error)))
        assert facts(error) == facts(rebuilt)

    def test_plain_unavailable_is_an_unreachable_peer(self, served):
        """
        A status UNAVAILABLE without our details becomes PeerUnavailable with the code's name.
        """
        rebuilt = served(lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone"))
        assert (PeerUnavailable, "gone") == (type(rebuilt), rebuilt.message)
        assert {"grpc_code": "UNAVAILABLE"} == rebuilt.metadata
        assert rebuilt.was_connected

    def test_cancellation_by_the_peer_is_an_unreachable_peer(self, served):
        """
        A status CANCELLED without our details that this side did not ask for, as of a server that
        stops, becomes PeerUnavailable.
        """
        rebuilt = served(lambda context: context.abort(grpc.StatusCode.CANCELLED, "stop"))
        assert (PeerUnavailable, "CANCELLED") == (type(rebuilt), rebuilt.metadata["grpc_code"])

    @pytest.mark.parametrize("how", ["cancel", "close"])
    def test_own_cancellation_is_a_cancelled_call(self, how):
        """
        A call that this side cancelled, or closed the channel of, becomes CallCancelled.
        """
        channel = grpc.insecure_channel("127.0.0.1:1")
        call = channel.unary_unary("/a/B").future(b"", wait_for_ready=True, timeout=60)
        call.cancel() if how == "cancel" else channel.close()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result()
        assert CallCancelled is type(from_rpc_error(call))
        channel.close()

    @pytest.mark.parametrize("name", sorted(ERROR_BY_CODE.keys() - {"UNAVAILABLE", "CANCELLED"}))
    def test_untyped_failure_has_the_class_of_its_code(self, served, name):
        """
        Any other code without our details becomes the class of the code.
        """
        code = grpc.StatusCode[name]
        rebuilt = served(lambda context: context.abort(code, "what?"))
        assert (ERROR_BY_CODE[name], "what?", name) == (
            type(rebuilt),
            rebuilt.message,
            rebuilt.metadata["grpc_code"],
        )

    def test_refusal_of_a_proxy_has_the_class_of_its_code(self, served):
        """
        A status with an ErrorInfo of another domain becomes the class of its code, with the time of
        its RetryInfo.
        """

        def refuse(context):
            status = to_status_proto(QueueFull("too many", retry_after_s=2.5))
            del status.details[0]
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="proxy"))
            context.abort_with_status(rpc_status.to_status(status))

        rebuilt = served(refuse)
        assert (ResourceExhausted, 2.5) == (type(rebuilt), rebuilt.retry_after_s)
        assert {"grpc_code": "RESOURCE_EXHAUSTED"} == rebuilt.metadata

    @pytest.mark.parametrize(
        ("address", "nothing_listens"),
        [("127.0.0.1:1", True), ("unix:/nowhere/socket", True), ("nothing.invalid:1", False)],
    )
    def test_unreachable_server_is_a_peer_that_was_never_connected(self, address, nothing_listens):
        """
        A refused connection, and a name without an address, become PeerUnavailable, which says that no
        server can have the call, and whether one listens at the address.
        """
        with grpc.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary("/test/Call")(b"", timeout=60)
            rebuilt = from_rpc_error(raised.value)
            assert (PeerUnavailable, False) == (type(rebuilt), rebuilt.was_connected)
            assert nothing_listens == rebuilt.nothing_listens

    async def test_asyncio_client_says_the_same_of_an_unreachable_server(self):
        """
        A call of asyncio for which no connection can be made says so too.
        """
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            with pytest.raises(grpc.RpcError) as raised:
                await channel.unary_unary("/test/Call")(b"", timeout=60)
        assert not from_rpc_error(raised.value).was_connected

    @pytest.mark.parametrize("code", [0, 2, 8], ids=["no error", "internal", "cancel"])
    def test_stream_that_a_proxy_drops_is_an_unreachable_peer(self, code):
        """
        A stream that is reset without a status becomes PeerUnavailable, whatever HTTP/2 code the reset has.
        """
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=drop_first_stream, args=(listener, code))
            thread.start()
            with grpc.insecure_channel("{}:{}".format(*listener.getsockname())) as channel:
                with pytest.raises(grpc.RpcError) as raised:
                    channel.unary_unary("/test/Call")(b"", timeout=60)
                rebuilt = from_rpc_error(raised.value)
                assert (PeerUnavailable, True) == (type(rebuilt), rebuilt.was_connected)
            thread.join()
