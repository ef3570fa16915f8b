"""The four kinds of gRPC handlers as one, for interceptors that wrap any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from scheduler_svc.frontend.calls.batches import status_follows
from scheduler_svc.frontend.calls.call_id import call_id
from tandem.errors import TandemError
from tandem.status import to_grpc_status

Handler = Any  # grpc.RpcMethodHandler is a set of optional callables without types
Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]
"""
Function that serves a call: it takes a request, or an iterator of requests, and is a coroutine, or
an asynchronous generator of responses.
"""

_WRAP = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behavior_of(handler: Handler) -> Behavior:
    """Return the function that serves the calls of a handler of any kind."""
    behavior: Behavior = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behavior


def with_behavior(
    handler: Handler,
    behavior: Callable[[Any, Context], Awaitable[object]],
    *,
    takes_stream: bool | None = None,
    decode: Callable[[bytes], object] | None = None,
    encode: Callable[[Any], bytes] | None = None,
) -> Handler:
    """
    Return a handler that is served by `behavior`, with the same coders unless others are given.

    Args:
        handler: The handler to follow.
        behavior: Serves its calls.
        takes_stream: True if `behavior` iterates over requests though `handler` takes one: gRPC
            then reads it when it is asked for. None = as `handler` does.
        decode: Decoder of requests; None = that of `handler`.
        encode: Encoder of responses; None = that of `handler`.
    """
    is_stream = handler.request_streaming if takes_stream is None else takes_stream
    return _WRAP[is_stream, handler.response_streaming](
        behavior,
        request_deserializer=decode or handler.request_deserializer,
        response_serializer=encode or handler.response_serializer,
    )


async def serve(behavior: Behavior, request: object, context: Context) -> object:
    """Serve a call; responses of a generator are written, those of a coroutine are returned."""
    answer = behavior(request, context)
    if not isinstance(answer, AsyncGenerator):
        return await answer
    async with aclosing(answer) as messages:
        async for message in messages:
            await write(context, message)
    return None


async def write(context: Context, message: object) -> None:
    """
    Write one message and wait until the client's window has room for it.

    Raises:
        asyncio.CancelledError: The client has left, and gRPC noticed it at this write before it
            cancelled the call.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def abort(context: Context, error: TandemError) -> None:
    """End a call with a typed status, which has the call's id."""
    status = to_grpc_status(error, request_id=call_id())
    status_follows()
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
