"""
Wake-ups of event loops by grpc.aio, read many at once.

A thread of grpc.aio waits for the events of all calls. For each it writes one byte to a socket
pair; the loop's reader takes one byte and every event that is there. With many events a turn, bytes
are left: the next turns are woken for nothing, and once the socket's buffer is full, about 280 of
them, the thread waits inside its write. From then on it brings one event per turn, and as it may
also be what polls the sockets (`grpc_polling`), connections are not read for seconds. What this
rests on is not public: grpcio's version is pinned, and test_grpc_wakeups.py counts turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see above

_MAX_BYTES = 4096
"""More than the buffer of a socket pair holds of one-byte writes."""
_NUM_KEPT = 2
"""Wake-ups that `_read_and_handle` does not read itself: the one that is handled, and one more."""


def read_all_wakeups(loop: asyncio.AbstractEventLoop) -> None:
    """
    Have this loop read all of grpc.aio's waiting wake-ups in two turns, instead of one in each.

    To be called before the loop's first channel or server is made; nothing else changes.
    """
    add_reader = loop.add_reader

    def add(file: Any, callback: Callable[..., Any], *args: Any) -> None:
        if _is_of_grpc(callback):
            callback = functools.partial(_read_and_handle, file, callback)
        add_reader(file, callback, *args)

    replacement: Any = add  # mypy has no wider type for it
    loop.add_reader = replacement  # type: ignore[method-assign]  # grpc.aio has no hook for this


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    method = getattr(callback, "func", None)  # of a functools.partial
    return isinstance(getattr(method, "__self__", None), cygrpc.PollerCompletionQueue)


def _read_and_handle(wakeups: socket.socket, handle: Callable[[], Any]) -> None:
    """
    Handle all events, for which `handle` reads one wake-up, then read the others but one.

    An event is there before its wake-up is written, so those that waited before are of events that
    are handled now, unless `handle` raises: at an event of a loop that is closed, for example. Then
    all stay, and the next turns handle the events behind it. One stays in any case, since another
    loop's thread may have read some meanwhile.
    """
    try:
        waiting = len(wakeups.recv(_MAX_BYTES, socket.MSG_PEEK))
    except BlockingIOError:
        return  # another loop's thread has read them, and gives this loop its events
    handle()
    if waiting > _NUM_KEPT:
        with contextlib.suppress(BlockingIOError):
            wakeups.recv(waiting - _NUM_KEPT)
