"""
Batches of gRPC's core under way when the client of their call goes, brought to their end.

grpc.aio allocates the operations of each batch, 80 bytes and what belongs to them, and frees them
in the coroutine that waits for the batch, after it. A batch that fails raises there, and one whose
coroutine is cancelled is left there: both are never freed, 100 to 500 bytes for each client that
goes meanwhile. Calls opened and reset without end would fill the memory of a server. gRPC's main
branch frees them with the object that owns them (`_BatchOperationTag`), which no release had when
this was written (1.85.3).

*Reads.* When a client goes, gRPC's core ends the call and, within a turn or two of the loop, the
batches that are under way. The call's task, which is cancelled in the first of these turns, is
cancelled `DELAY_S` later here, when the batches are over. So a handler may take a client that has
gone for one that has said all, for `DELAY_S`: it must do nothing then that a cancellation does not
undo.

*Status.* Code that sends a call's status says so first (`status_follows`), and its failure counts
as its end then: as a rule the client has gone. A message that fails is lost as before: one batch
for each client that goes while one is written.

What this rests on is not public, as in `screened_server`; test_batches.py counts bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see above

DELAY_S = 0.01
"""Seconds after its client's going in which a call's batches end."""

_HANDLER = "_handle_exceptions"
"""Coroutine of grpc.aio that runs a call's handler."""
_WATCHER = "rpc_task"
"""Name of the task of grpc.aio that cancels it when the client has gone."""


def let_batches_end(loop: asyncio.AbstractEventLoop) -> None:
    """Have the batches of a loop's calls end before the calls, when their clients go."""
    if loop.get_task_factory() is _create_task:
        return
    loop.set_task_factory(_create_task)
    create_future = loop.create_future

    def create() -> asyncio.Future[Any]:
        sender, _next.sender = _next.sender, None
        if sender is not None and sender is asyncio.current_task(loop):
            return _StatusFuture(loop=loop)
        return create_future()

    replacement: Any = create  # mypy has no wider type for it
    loop.create_future = replacement  # type: ignore[method-assign]  # grpc.aio has no hook for this


def status_follows() -> None:
    """
    Note that this task's next batch sends a call's status; to be called right before the call ends,
    with nothing awaited in between.
    """
    _next.sender = asyncio.current_task()


def _create_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, Any, Any],
    /,
    **kwargs: Any,
) -> asyncio.Task[Any]:
    is_handler = getattr(coroutine, "__name__", "") == _HANDLER
    return (_HandlerTask if is_handler else asyncio.Task)(coroutine, loop=loop, **kwargs)


class _HandlerTask(asyncio.Task[Any]):
    """Task of a call's handler."""

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the handler; `DELAY_S` later where its client has gone."""
        loop = self.get_loop()
        canceller = asyncio.current_task(loop)
        if canceller is None or canceller.get_name() != _WATCHER:
            return super().cancel(msg)
        # In two steps: a turn lies between, which takes gRPC's events even after the loop was late.
        loop.call_later(DELAY_S / 2, loop.call_later, DELAY_S / 2, super().cancel, msg)
        return not self.done()


class _Next(threading.local):
    """The task whose next future is that of a batch with a status, in this thread's loop."""

    sender: asyncio.Task[Any] | None = None


_next = _Next()


class _StatusFuture(asyncio.Future[Any]):
    """Future of a batch that sends a status, or of anything else if none was sent after all."""

    def set_exception(self, exception: type | BaseException, /) -> None:
        if isinstance(exception, cygrpc.ExecuteBatchError):
            self.set_result(None)
        else:
            super().set_exception(exception)
