"""Conversion of errors to gRPC statuses, in one place for every method of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from executor_svc.server.call_places import is_of_link
from tandem.errors import InternalError, InvalidParameter, SessionHeld, TandemError
from tandem.status import to_grpc_status

_log = structlog.get_logger(__name__)


Decode = Callable[[Any], Any]


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """
    An interceptor that turns TandemErrors into typed statuses, and others into INTERNAL.

    Errors are logged. A scheduler that waits for the end of another's session asks every second or
    two: the same refusal again is logged at level debug. It is the outermost interceptor, as it
    also says which threads a method runs on.
    """

    def __init__(self, link_threads: ThreadPoolExecutor) -> None:
        """
        Args:
            link_threads: Threads of the step link's methods; others run on the server's.
        """
        self._link_threads = link_threads
        self._last_held = ""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method that the continuation finds."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        decode = _decoder(handler.request_deserializer, method)
        # gRPC itself would answer what it cannot decode with a bare INTERNAL.
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(handler.unary_unary, method, decode),
                _undecoded,
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, decode),
                _undecoded,
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(
                    handler.stream_stream, method, lambda requests: map(decode, requests)
                ),
                _undecoded,
                handler.response_serializer,
            )
        return handler

    def _unary(
        self, behavior: Callable[..., Any], method: str, decode: Decode
    ) -> Callable[..., Any]:
        def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behavior(decode(request), context)
            except Exception as error:  # noqa: BLE001  # the outermost frame of every call
                self._abort(context, method, error)

        return self._on_threads(wrapped, method)

    def _streaming(
        self, behavior: Callable[..., Any], method: str, decode: Decode
    ) -> Callable[..., Any]:
        def wrapped(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from behavior(decode(request), context)
            except grpc.RpcError:
                raise  # the caller is gone; gRPC ends the call
            except Exception as error:  # noqa: BLE001  # the outermost frame of every call
                self._abort(context, method, error)

        return self._on_threads(wrapped, method)

    def _on_threads(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        if is_of_link(method):
            # The one attribute by which grpc.server lets a method have threads of its own.
            behavior.__dict__["experimental_thread_pool"] = self._link_threads
        return behavior

    def _abort(self, context: grpc.ServicerContext, method: str, error: Exception) -> NoReturn:
        if not isinstance(error, TandemError):
            _log.error("call_broken", method=method, exc_info=error)
            error = InternalError("a bug in the executor: see its log")
        is_repeated = isinstance(error, SessionHeld) and error.message == self._last_held
        if isinstance(error, SessionHeld):
            self._last_held = error.message
        say = _log.debug if is_repeated else _log.info
        say("call_failed", method=method, reason=error.reason, message=error.message)
        context.abort_with_status(to_grpc_status(error))


def _undecoded(raw: bytes) -> bytes:
    return raw


def _decoder(decode: Decode | None, method: str) -> Decode:
    """Return a decoder of requests that raises InvalidParameter for what is no message."""
    if decode is None:
        return _undecoded

    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except (DecodeError, ValueError) as error:
            raise InvalidParameter(
                f"the request bytes are not a valid message for {method}; "
                "send protobuf of this contract, with UTF-8 in all strings",
                field="",
            ) from error

    return decoded
