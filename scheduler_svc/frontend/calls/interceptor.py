"""Outermost layer of every call: requests are decoded, and errors become typed statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from scheduler_svc.frontend.calls.batches import status_follows
from scheduler_svc.frontend.calls.call_id import start_call
from scheduler_svc.frontend.calls.failures import typed_failure
from scheduler_svc.frontend.calls.refusal_lines import RefusalLines
from scheduler_svc.frontend.calls.rpc_handlers import (
    Context,
    Handler,
    abort,
    behavior_of,
    serve,
    with_behavior,
)
from scheduler_svc.frontend.intake.connection import connection_of
from scheduler_svc.frontend.intake.decoding import MessageIntake


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """
    Maps a TandemError to its status; other exceptions are bugs: logged, and INTERNAL. Requests
    reach it as bytes, so that it bounds what is decoded.
    """

    def __init__(
        self, intake: MessageIntake | None = None, refusals: RefusalLines | None = None
    ) -> None:
        """
        Args:
            intake: Decoder of requests, the same for all servers of a process; None for one of its
                own.
            refusals: Sums up lines about refused calls, also those that items of calls need; None
                for one of its own.
        """
        self._intake = intake or MessageIntake()
        self._refusals = refusals or RefusalLines()

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
            _guarded(handler, method, self._intake, self._refusals),
            decode=_undecoded,
            encode=_unless_serialized(handler.response_serializer),
        )


def _guarded(
    handler: Handler, method: str, intake: MessageIntake, refusals: RefusalLines
) -> Callable[[Any, Context], Awaitable[object]]:
    behavior, decode = behavior_of(handler), handler.request_deserializer

    async def decoded(raw: bytes, context: Context) -> object:
        if decode is None:
            return raw
        connection = connection_of(context.peer(), context)
        return await intake.decode(raw, decode, method, connection)

    async def each_decoded(
        requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[object]:
        async for raw in requests:
            yield await decoded(raw, context)

    async def respond(request: Any, context: Context) -> object:
        start_call(context.invocation_metadata())
        try:
            if handler.request_streaming:
                answer = await serve(behavior, each_decoded(request, context), context)
            else:
                answer = await serve(behavior, await decoded(request, context), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  # a bug: a typed error to the client, a traceback to the log
            await abort(context, typed_failure(error, method, refusals))
            return None
        status_follows()
        return answer

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
