"""
Reading of a stream so that Ctrl-C hurts nothing but the stream that is read.

Python raises KeyboardInterrupt in the main thread, wherever that is. gRPC's calls are Python code
which takes locks that the threads of its channel need as well: an interrupt between the taking of
a lock and the `try` that gives it back leaves the channel dead, and every later call waits for
ever. So a thread of the stream's own starts its calls, reads, retries and cancels; the main thread
touches queues alone, which are written in C and which an interrupt cannot leave half changed.
Threads are started with `_thread` for the same reason: `Thread.start` waits for a lock in Python.

Calls without a stream are still made in the main thread: of those an interrupt can meet only the
moments in which they begin and end.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Protocol

NUM_AHEAD = 8
"""Events read before they are asked for; with more, a slow reader would not slow the server."""
EXIT_S = 5.0
"""Longest wait, in seconds, for each thread when the program ends."""

_log = logging.getLogger(__name__)
_Ended = SimpleQueue[None]
"""Has an item once a thread has ended."""

_reading: dict[_Ended, Callable[[], None]] = {}
"""How to end each thread that reads for the main thread."""
_doing: list[_Doer] = []
"""The thread that acts for the main thread, once there is one."""


class Source(Protocol):
    """Calls of one completion."""

    def is_closed(self) -> bool:
        """Return True once more events are wanted no longer."""

    def events(self) -> Generator[Any, None, None]:
        """Yield the events of all calls; closing this generator cancels the call that runs."""

    def close(self) -> None:
        """End the events soon; safe from any thread, and more than once."""


def read_safely(source: Source) -> Iterator[Any]:
    """
    Yield the events of a source, none after it was closed, and close it at the end.

    A thread other than the main one reads the source itself: no interrupt is raised there.
    """
    if threading.current_thread() is threading.main_thread():
        yield from _read_by_another(source)
    else:
        yield from source.events()


def do_safely(action: Callable[[], None]) -> None:
    """
    Do a short action of gRPC's. One of the main thread is done by another thread, after those that
    were left to it before; one that raises is logged there.
    """
    if threading.current_thread() is not threading.main_thread():
        action()
        return
    try:
        doer = _doer()
    except RuntimeError:  # no thread can be started, as when the program ends
        action()
    else:
        doer.do(action)


class _Doer:
    """A thread that does what the main thread leaves to it, one after the other."""

    def __init__(self) -> None:
        self.ended = _Ended()
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        _thread.start_new_thread(self._run, ())

    def do(self, action: Callable[[], None]) -> None:
        """Do an action soon."""
        self._actions.put(action)

    def end(self) -> None:
        """End once all actions are done."""
        self._actions.put(None)

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception:  # noqa: BLE001  # an interceptor's, for example
                _log.exception("an action for the main thread failed")
            del action  # it holds a call
        self.ended.put(None)


def _doer() -> _Doer:
    if not _doing:
        _doing.append(_Doer())
    return _doing[0]


def _read_by_another(source: Source) -> Iterator[Any]:
    wanted: SimpleQueue[bool] = SimpleQueue()
    read: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    for _ in range(NUM_AHEAD):
        wanted.put(True)
    run = contextvars.copy_context().run  # metadata may be a function that looks at a trace
    _doer()  # when the program ends, it is too late to start one
    try:
        _thread.start_new_thread(run, (_read, source, wanted, read))
        while True:
            event, failure = read.get()
            if source.is_closed() or isinstance(failure, StopIteration):
                return
            if failure is not None:
                raise failure
            yield event
            wanted.put(True)
    finally:
        wanted.put(False)
        source.close()


def _read(
    source: Source,
    wanted: SimpleQueue[bool],
    read: SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    """Pass events on, one for each True, until they end or a False comes."""

    def stop() -> None:
        wanted.put(False)
        source.close()

    ended = _Ended()
    _reading[ended] = stop
    events = source.events()
    try:
        while wanted.get():
            read.put((next(events), None))
    except BaseException as failure:  # noqa: BLE001  # raised where the events are asked for
        read.put((None, failure))
    finally:
        events.close()
        del _reading[ended]
        ended.put(None)


def _end() -> None:
    """
    End all threads before Python freezes them: one that then has a lock of gRPC's keeps it, and
    the objects that are freed last wait for it.
    """
    reading, doers = dict(_reading), list(_doing)
    for stop in reading.values():
        stop()
    _doing.clear()  # what comes after this is done by a new one, or by the main thread
    for doer in doers:
        doer.end()
    for ended in (*reading, *(doer.ended for doer in doers)):
        with contextlib.suppress(Empty):
            ended.get(timeout=EXIT_S)


def _forget() -> None:
    """Forget the threads in a forked process, which has none of them."""
    _reading.clear()
    _doing.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
