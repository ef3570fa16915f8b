"""
A server of grpc.aio that no call's method can stop.

grpc.aio decodes the `:path` of a call for a method that it does not know in the loop that takes all
calls; a path that is not UTF-8, one frame from any peer, ends that loop, and the port answers no
call afterwards. Calls of registered methods never pass there. So the others are answered here,
without a look at their path, as grpc.aio would answer them. What this rests on is not public;
grpcio's version is pinned for the step link already, and test_screened_server.py sends such a
frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see above

_UNKNOWN = "Method not found!"
"""Words of grpc.aio's own answer, which clients may know."""


class _ScreenedCore(cygrpc.AioServer):  # type: ignore[misc]  # of an untyped extension module
    """Core of a server whose handlers are all registered by their methods' names."""

    async def _request_call(self) -> None:
        """Answer calls of unknown methods; ends when the server does, by an exception."""
        loop = asyncio.get_running_loop()
        refusals: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            refusal = loop.create_task(_refuse(call, loop))
            refusals.add(refusal)  # a loop keeps weak references only
            refusal.add_done_callback(refusals.discard)


async def _refuse(call: Any, loop: asyncio.AbstractEventLoop) -> None:
    context = cygrpc._ServicerContext(call, None, None, loop)  # noqa: SLF001  # see above
    try:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _UNKNOWN)
    except (grpc.aio.AbortError, grpc.aio.BaseError, asyncio.CancelledError):
        return  # answered, or the client has gone


def screened_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # not at run time
    options: Sequence[tuple[str, Any]],
) -> grpc.aio.Server:
    """Return a server; its services must register their methods, as generated code does."""
    plain = cygrpc.AioServer
    cygrpc.AioServer = _ScreenedCore  # the constructor has no argument for it
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain
