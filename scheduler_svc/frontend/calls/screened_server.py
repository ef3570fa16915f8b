"""
A server of grpc.aio that no call's method can stop, and whose callers take turns.

*Methods.* grpc.aio decodes the `:path` of a call for a method that it does not know in the loop
that takes all calls; a path that is not UTF-8, one frame from any peer, ends that loop, and the
port answers no call afterwards. Calls of registered methods never pass there. So the others are
answered here, without a look at their path, as grpc.aio would answer them.

*Turns.* grpc.aio asks gRPC's core for one call of a method at a time, and gets those of all callers
in the order in which they came: after a caller that makes thousands of calls at once, every other
one waits for all of them. Here many are asked for, and handed on as the gate says (`CallGate`).

What this rests on is not public; grpcio's version is pinned for the step link already, and
test_screened_server.py sends such frames and such crowds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see above

from scheduler_svc.frontend.calls.batches import let_batches_end, status_follows
from scheduler_svc.frontend.calls.call_line import CallLine
from scheduler_svc.frontend.calls.rpc_handlers import Context, abort
from tandem.errors import HandedOver

NUM_POSTED = 256
"""Calls of a method that may be taken over from gRPC's core within one turn of the loop."""

_UNKNOWN = "Method not found!"
"""Words of grpc.aio's own answer, which clients may know."""
_ANSWERED_OR_GONE = (grpc.aio.AbortError, grpc.aio.BaseError, asyncio.CancelledError)
"""Exceptions of `abort`: it is done, or the client has gone."""


class CallGate(Protocol):
    """Decides whose calls begin. Its callers are those that take turns."""

    def caller_of(self, context: Context) -> Hashable:
        """Return the caller of a call that has not begun: only its metadata may be read."""

    def may_begin(self, caller: Hashable, method: str) -> bool:
        """Return False while calls of this caller, of this method, have to wait."""

    def notify(self, changed: Callable[[], None]) -> None:
        """Call `changed` once, as soon as a caller that might not begin a call perhaps may."""


class _Line:
    """Calls of one method: taken over from gRPC's core, waiting, handed on."""

    def __init__(self, core: _ScreenedCore, method: bytes) -> None:
        self._core = core
        self._method = method
        self._calls: CallLine[Any] = CallLine()
        self._has_news = asyncio.Event()
        """Set when a call has come, the gate has changed, or the server has stopped."""
        self._stopped: Exception | None = None
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._take_over()) for _ in range(NUM_POSTED)}

    async def next(self) -> Any:
        """Return the next call that may begin; ends as `posted` does when the server stops."""
        method = self._method.decode()
        while self._stopped is None:
            call = self._calls.take(lambda caller: self._core.gate.may_begin(caller, method))
            if call is not None:
                return call
            if len(self._calls):
                self._core.gate.notify(self._has_news.set)
            self._has_news.clear()
            await self._has_news.wait()
        raise self._stopped

    async def _take_over(self) -> None:
        try:
            while True:
                call = await self._core.posted(self._method)
                self._calls.add(self._core.gate.caller_of(_context(call)), call)
                self._has_news.set()
                del call  # it holds its message, and the next one may come in an hour
        except cygrpc._RequestCallError as error:  # noqa: SLF001  # see above
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Refuse the calls that wait, and end."""
        self._stopped = error
        self._has_news.set()
        for call in self._calls.take_all():
            refusal = asyncio.get_running_loop().create_task(_hand_over(call))
            self._tasks.add(refusal)  # a loop keeps weak references only
            refusal.add_done_callback(self._tasks.discard)


class _ScreenedCore(cygrpc.AioServer):  # type: ignore[misc]  # of an untyped extension module
    """Core of a server whose handlers are all registered by their methods' names."""

    gate: CallGate
    """Set once, before the server starts, as `lined`."""
    lined: frozenset[bytes]
    """Methods whose callers take turns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines: dict[bytes, _Line] = {}

    async def _request_registered_call(self, method: bytes) -> Any:
        if method not in self.lined:
            return await self.posted(method)
        if method not in self._lines:
            self._lines[method] = _Line(self, method)
        return await self._lines[method].next()

    async def posted(self, method: bytes) -> Any:
        """Return a call of this method that gRPC's core hands on."""
        return await super()._request_registered_call(method)

    async def _request_call(self) -> None:
        """Answer calls of unknown methods; ends when the server does, by an exception."""
        loop = asyncio.get_running_loop()
        refusals: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            refusal = loop.create_task(_refuse(call))
            refusals.add(refusal)  # a loop keeps weak references only
            refusal.add_done_callback(refusals.discard)
            del call, refusal  # as above


def _context(call: Any) -> Any:
    loop = asyncio.get_running_loop()
    return cygrpc._ServicerContext(call, None, None, loop)  # noqa: SLF001  # see above


async def _refuse(call: Any) -> None:
    """Answer a call of a method that there is not."""
    status_follows()
    with contextlib.suppress(*_ANSWERED_OR_GONE):
        await _context(call).abort(grpc.StatusCode.UNIMPLEMENTED, _UNKNOWN)


async def _hand_over(call: Any) -> None:
    """Answer a call whose turn does not come any more."""
    with contextlib.suppress(*_ANSWERED_OR_GONE):
        await abort(_context(call), HandedOver("the scheduler is stopping: send the request again"))


def screened_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # not at run time
    options: Sequence[tuple[str, Any]],
    gate: CallGate,
    lined: Collection[str],
) -> grpc.aio.Server:
    """
    Return a server on the loop that runs; its services must register their methods, as generated
    code does.

    Args:
        interceptors: Its interceptors, the outermost first.
        options: Arguments of gRPC's core.
        gate: Decides whose calls begin.
        lined: Methods whose callers take turns.
    """

    def make_core(*args: Any, **kwargs: Any) -> _ScreenedCore:
        core = _ScreenedCore(*args, **kwargs)
        core.gate = gate
        core.lined = frozenset(method.encode() for method in lined)
        return core

    let_batches_end(asyncio.get_running_loop())
    plain = cygrpc.AioServer
    cygrpc.AioServer = make_core  # the constructor has no argument for it
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain
