"""Outermost layer of every call: errors become typed statuses, undecodable requests an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from tandem.errors import InternalError, InvalidParameter, TandemError
from tandem.status import to_grpc_status

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

MAX_MESSAGE_BYTES = 600
"""Limit of an error's text, which may quote a client; trailers must stay under 8 KiB."""

Handler = Any  # grpc.RpcMethodHandler is a set of optional callables without types


@dataclass(frozen=True, slots=True)
class _Garbage:
    """Placeholder for a request that could not be decoded."""

    method: str


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Maps a TandemError to its status; other exceptions are bugs: logged, and INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap handlers that take one request; those that take a stream (reflection) stay plain."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method
        wrap = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return wrap(
            _guarded(handler.unary_stream or handler.unary_unary, method),
            request_deserializer=_tolerant(handler.request_deserializer, method),
            response_serializer=_unless_serialized(handler.response_serializer),
        )


def _guarded(behavior: Callable[..., Awaitable[object]], method: str) -> Callable[..., Any]:
    async def respond(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        try:
            if isinstance(request, _Garbage):
                await _abort(context, _undecodable(request))
            return await behavior(request, context)
        except TandemError as error:
            _log.info("call_failed", method=method, reason=error.reason, field=error.field)
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001  # a bug: a typed error to the client, a traceback to the log
            _log.exception("call_broken", method=method)
            await _abort(
                context,
                InternalError(
                    "the scheduler failed on this call because of a bug; "
                    "its log has the traceback, as event call_broken"
                ),
            )
        return None

    return respond


def _tolerant(decode: Callable[[bytes], object], method: str) -> Callable[[bytes], object]:
    """Return a decoder that returns _Garbage at a failure: gRPC would answer a bare INTERNAL."""

    def decode_or_mark(raw: bytes) -> object:
        try:
            return decode(raw)
        except (DecodeError, ValueError):
            return _Garbage(method)

    return decode_or_mark


def _unless_serialized(encode: Callable[[object], bytes]) -> Callable[[object], bytes]:
    """Return an encoder that passes responses through that are bytes already."""

    def encode_or_pass(response: object) -> bytes:
        return response if isinstance(response, bytes) else encode(response)

    return encode_or_pass


def _undecodable(garbage: _Garbage) -> TandemError:
    return InvalidParameter(
        f"the request bytes are not a valid message for {garbage.method}; "
        "send protobuf of this contract, with UTF-8 in all strings",
        field="",
    )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> None:
    encoded = error.message.encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        error.message = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
    status = to_grpc_status(error)
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
