"""Outermost layer of every call: requests are decoded, and errors become typed statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from scheduler_svc.frontend.calls.call_id import call_id, start_call
from scheduler_svc.frontend.calls.rpc_handlers import (
    Context,
    Handler,
    behavior_of,
    serve,
    with_behavior,
)
from scheduler_svc.frontend.intake.decoding import MessageIntake
from tandem.errors import InternalError, TandemError
from tandem.status import to_grpc_status

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

MAX_MESSAGE_BYTES = 600
"""Limit of an error's text, which may quote a client; trailers must stay under 8 KiB."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """
    Maps a TandemError to its status; other exceptions are bugs: logged, and INTERNAL. Requests
    reach it as bytes, so that it bounds what is decoded.
    """

    def __init__(self, intake: MessageIntake | None = None) -> None:
        """
        Args:
            intake: Decoder of requests, the same for all servers of a process; None for one of its
                own.
        """
        self._intake = intake or MessageIntake()

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
            _guarded(handler, method, self._intake),
            decode=_undecoded,
            encode=_unless_serialized(handler.response_serializer),
        )


def _guarded(
    handler: Handler, method: str, intake: MessageIntake
) -> Callable[[Any, Context], Awaitable[object]]:
    behavior, decode = behavior_of(handler), handler.request_deserializer

    async def decoded(raw: bytes) -> object:
        return raw if decode is None else await intake.decode(raw, decode, method)

    async def each_decoded(requests: AsyncIterator[bytes]) -> AsyncIterator[object]:
        async for raw in requests:
            yield await decoded(raw)

    async def respond(request: Any, context: Context) -> object:
        start_call(context.invocation_metadata())
        try:
            if handler.request_streaming:
                return await serve(behavior, each_decoded(request), context)
            return await serve(behavior, await decoded(request), context)
        except TandemError as error:
            _log.info(
                "call_failed",
                method=method,
                call_id=call_id(),
                reason=error.reason,
                field=error.field,
            )
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001  # a bug: a typed error to the client, a traceback to the log
            _log.exception("call_broken", method=method, call_id=call_id())
            await _abort(
                context,
                InternalError(
                    "the scheduler failed on this call because of a bug; "
                    "its log has the traceback, as event call_broken"
                ),
            )
        return None

    return respond


def _undecoded(raw: bytes) -> bytes:
    return raw


def _unless_serialized(
    encode: Callable[[object], bytes] | None,
) -> Callable[[object], bytes] | None:
    """Return an encoder that passes responses through that are bytes already."""
    if encode is None:
        return None

    def encode_or_pass(response: object) -> bytes:
        return response if isinstance(response, bytes) else encode(response)

    return encode_or_pass


async def _abort(context: Context, error: TandemError) -> None:
    encoded = error.message.encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        error.message = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
    status = to_grpc_status(error, request_id=call_id())
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
