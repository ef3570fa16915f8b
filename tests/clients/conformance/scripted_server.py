"""A server that plays the calls of one case, and keeps the requests that it gets."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.inference.v1 import inference_service_pb2 as inference

SERVICE = "tandem.inference.v1.InferenceService"
PATIENCE_S = 60.0
"""Seconds to wait for what must come: a slow machine takes its time."""


class Script:
    """
    Calls of one case, played in order.

    Attributes:
        seen: Requests of the calls so far, more than the case has among them.
        cancelled: Set when a call that hangs was cancelled.
        address: Address of the server.
    """

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self.seen: list[inference.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.address = ""
        self._calls = list(calls)

    def generate(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Play the next call of Generate."""
        call = self._next(request, context)
        hangs = call.get("hang", False)
        if hangs:  # gRPC never comes back for what follows a message that a cancelled call got
            context.add_callback(self.cancelled.set)
        for message in call["send"]:
            yield encoded(message)
        if hangs:
            self.cancelled.wait(2 * PATIENCE_S)
            return
        if "end" in call:
            fail(context, call["end"])

    def complete(
        self, request: inference.CompleteRequest, context: grpc.ServicerContext
    ) -> inference.CompleteResponse:
        """Play the next call of Complete."""
        call = self._next(request.request, context)
        if "end" in call:
            fail(context, call["end"])
        return ParseDict(call["answer"], inference.CompleteResponse())

    def _next(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext
    ) -> dict[str, Any]:
        self.seen.append(request)
        if not self._calls:
            context.abort(grpc.StatusCode.INTERNAL, "the case has no further call")
        return self._calls.pop(0)


def encoded(message: dict[str, Any]) -> bytes:
    """Return the bytes of one message of a stream."""
    if "raw" in message:
        return base64.b64decode(message["raw"])
    return ParseDict(message, inference.GenerateResponse()).SerializeToString()


def fail(context: grpc.ServicerContext, end: dict[str, Any]) -> NoReturn:
    """End a call with a status, and with details if the case names a reason."""
    code = grpc.StatusCode[end["code"]]
    if "reason" not in end:
        context.abort(code, end["message"])
    details = [
        error_details_pb2.ErrorInfo(
            reason=end["reason"], domain="tandem", metadata=end.get("metadata", {})
        )
    ]
    if "field" in end:
        violation = error_details_pb2.BadRequest.FieldViolation(field=end["field"])
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if "retry_after_ms" in end:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(end["retry_after_ms"])
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in details]
    for one, detail in zip(packed, details, strict=True):
        one.Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=end["message"], details=packed)
    context.abort_with_status(rpc_status.to_status(status))


@contextmanager
def scripted_server(calls: list[dict[str, Any]]) -> Iterator[Script]:
    """Serve a script on a free port until the block ends."""
    script = Script(calls)
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            script.generate, inference.GenerateRequest.FromString
        ),
        "Complete": grpc.unary_unary_rpc_method_handler(
            script.complete,
            inference.CompleteRequest.FromString,
            inference.CompleteResponse.SerializeToString,
        ),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield script
    finally:
        server.stop(None).wait()
