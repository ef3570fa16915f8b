"""
Batches of gRPC's core under way when the client of their call goes, brought to their end.

grpc.aio allocates the operations of each batch, 80 bytes and what belongs to them, and frees them
in the coroutine that waits for the batch, after it. A batch that fails raises there, and one whose
coroutine is cancelled is left there: both are never freed, about 100 bytes for each client that
goes while its call reads. Calls opened and reset without end would fill the memory of a server.
gRPC's main branch frees them with the object that owns them (`_BatchOperationTag`), which no
release had when this was written (1.85.3).

When a client goes, gRPC's core ends the call and, within a turn or two of the loop, the batches
that are under way. The call's task, cancelled with the first, is cancelled `DELAY_S` later here,
after the others. A failure of the last status, which has no reader any more, is taken for an end.

What this rests on is not public, as in `screened_server`; test_batches.py counts bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see above

DELAY_S = 0.01
"""Seconds after its client's going in which a call's batches end."""

_HANDLER = "_handle_exceptions"
"""Coroutine of grpc.aio that runs a call's handler."""
_WATCHER = "rpc_task"
"""Name of the task of grpc.aio that cancels it when the client has gone."""


def let_reads_end(loop: asyncio.AbstractEventLoop) -> None:
    """Have calls of this loop's servers, whose clients go, see the end of their reads first."""

    def create(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, Any, Any],
        /,
        **kwargs: Any,
    ) -> asyncio.Task[Any]:
        is_handler = getattr(coroutine, "__name__", "") == _HANDLER
        kind = _HandlerTask if is_handler else asyncio.Task
        return kind(coroutine, loop=loop, **kwargs)

    loop.set_task_factory(create)


class _HandlerTask(asyncio.Task[Any]):
    """Task of a call's handler."""

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the handler; `DELAY_S` later where its client has gone."""
        canceller = asyncio.current_task()
        if canceller is None or canceller.get_name() != _WATCHER:
            return super().cancel(msg)
        self.get_loop().call_later(DELAY_S, super().cancel, msg)
        return not self.done()


class LastBatches:
    """
    Event loop for the last batch of a call, a status: that it fails does not matter.

    Slower than the loop for which it stands, of whose turns gRPC's events do not know.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def create_future(self) -> asyncio.Future[None]:
        """Return a future of a batch, which its failure ends like its success."""
        return _LastBatch(loop=self._loop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class _LastBatch(asyncio.Future[None]):
    def set_exception(self, exception: type | BaseException, /) -> None:
        if isinstance(exception, cygrpc.ExecuteBatchError):
            self.set_result(None)
        else:
            super().set_exception(exception)
