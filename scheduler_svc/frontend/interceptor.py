"""Outermost layer of every call: errors become typed statuses, undecodable requests an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.frontend.rpc_handlers import (
    Context,
    Handler,
    behavior_of,
    serve,
    with_behavior,
)
from tandem.errors import InternalError, InvalidParameter, TandemError
from tandem.status import to_grpc_status

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

MAX_MESSAGE_BYTES = 600
"""Limit of an error's text, which may quote a client; trailers must stay under 8 KiB."""


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
        """Wrap handlers of every kind; one that takes a stream reads it by iteration."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        return with_behavior(
            handler,
            _guarded(handler, method),
            decode=_tolerant(handler.request_deserializer, method),
            encode=_unless_serialized(handler.response_serializer),
        )


def _guarded(handler: Handler, method: str) -> Callable[[Any, Context], Awaitable[object]]:
    behavior = behavior_of(handler)

    async def respond(request: Any, context: Context) -> object:
        try:
            checked = _each_checked(request) if handler.request_streaming else _checked(request)
            return await serve(behavior, checked, context)
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


async def _each_checked(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    async for request in requests:
        yield _checked(request)


def _checked(request: object) -> object:
    if isinstance(request, _Garbage):
        raise _undecodable(request)
    return request


def _tolerant(
    decode: Callable[[bytes], object] | None, method: str
) -> Callable[[bytes], object] | None:
    """Return a decoder that returns _Garbage at a failure: gRPC would answer a bare INTERNAL."""
    if decode is None:  # the handler takes bytes
        return None

    def decode_or_mark(raw: bytes) -> object:
        try:
            return decode(raw)
        except (DecodeError, ValueError):
            return _Garbage(method)

    return decode_or_mark


def _unless_serialized(
    encode: Callable[[object], bytes] | None,
) -> Callable[[object], bytes] | None:
    """Return an encoder that passes responses through that are bytes already."""
    if encode is None:
        return None

    def encode_or_pass(response: object) -> bytes:
        return response if isinstance(response, bytes) else encode(response)

    return encode_or_pass


def _undecodable(garbage: _Garbage) -> TandemError:
    return InvalidParameter(
        f"the request bytes are not a valid message for {garbage.method}; "
        "send protobuf of this contract, with UTF-8 in all strings",
        field="",
    )


async def _abort(context: Context, error: TandemError) -> None:
    encoded = error.message.encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        error.message = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
    status = to_grpc_status(error)
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
