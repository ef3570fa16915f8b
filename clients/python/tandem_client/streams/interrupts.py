"""
Reading of a call so that Ctrl-C in the middle of it harms nothing but the call.

Python raises KeyboardInterrupt in the main thread, wherever that is. gRPC's iterator is Python code
which takes locks that the threads of its channel need as well: an interrupt between the taking of
a lock and the `try` that gives it back leaves the channel dead, and every later call waits for
ever. So the main thread leaves the reading to a thread of the call's own, and waits for it in a
queue that is written in C, which an interrupt cannot leave half changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

NUM_AHEAD = 8
"""Messages read before they are asked for; with more, a slow reader would not slow the server."""


def read_safely(call: Iterator[Any]) -> Iterator[Any]:
    """
    Return an iterator over the messages of a call, which the caller cancels if it stops early.

    A thread other than the main one reads the call itself: no interrupt is raised there.
    """
    if threading.current_thread() is not threading.main_thread():
        return call
    return _read_by_another(call)


def _read_by_another(call: Iterator[Any]) -> Iterator[Any]:
    wanted: SimpleQueue[bool] = SimpleQueue()
    read: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
    for _ in range(NUM_AHEAD):
        wanted.put(True)
    threading.Thread(
        target=_read, args=(call, wanted, read), name="reads-a-stream", daemon=True
    ).start()
    try:
        while True:
            message, failure = read.get()
            if isinstance(failure, StopIteration):
                return
            if failure is not None:
                raise failure
            yield message
            wanted.put(True)
    finally:
        wanted.put(False)


def _read(
    call: Iterator[Any],
    wanted: SimpleQueue[bool],
    read: SimpleQueue[tuple[Any, Exception | None]],
) -> None:
    """Pass messages on, one for each True, until the call ends or a False comes."""
    while wanted.get():
        try:
            read.put((next(call), None))
        except Exception as failure:  # noqa: BLE001  # raised where the messages are asked for
            read.put((None, failure))
            return
