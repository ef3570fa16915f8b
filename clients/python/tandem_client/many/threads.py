"""Many completions at once, for threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from itertools import islice

from tandem.errors import TandemError
from tandem.status import CallCancelled
from tandem_client.many import Item, Outcome, refused
from tandem_client.many.shared_threads import SharedStream
from tandem_client.streams.interrupts import do_safely
from tandem_client.streams.stream import GenerationStream

Start = Callable[[Item], GenerationStream]
"""Function that makes the stream of one prompt."""


class _Running:
    """Streams that run, which can all be closed at once from another thread."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._streams: set[GenerationStream] = set()
        self._is_closed = False

    def outcome(self, item: Item) -> Outcome:
        """Run one prompt to its end, and return its outcome."""
        try:
            stream = self._start(item)
        except TandemError as error:
            return error
        except TypeError as error:
            return refused(error)
        with self._lock:
            if self._is_closed:
                return CallCancelled("the batch was closed")
            self._streams.add(stream)
        try:
            return stream.result()
        except TandemError as error:
            return error
        finally:
            with self._lock:
                self._streams.remove(stream)

    def close(self) -> None:
        """Close every stream; prompts that have not begun never do."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()


def in_threads(
    start: Start, prompts: Iterable[Item], concurrency: int, shared: SharedStream | None = None
) -> Generator[Outcome]:
    """
    Yield the outcome of each prompt, in order.

    Args:
        start: Function that makes the stream of one prompt.
        prompts: Prompts, which are taken as they are needed.
        concurrency: Largest number of streams at once.
        shared: Stream of which they are items; it is closed at the end.
    """
    running = _Running(start)
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="generate_many")
    ahead: deque[Future[Outcome]] = deque()
    source = iter(prompts)
    try:
        while True:
            # Each prompt has the context of the caller, for example the span that it is in.
            ahead += (
                pool.submit(copy_context().run, running.outcome, item)
                for item in islice(source, 2 * concurrency - len(ahead))
            )
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        running.close()
        if shared is not None:
            do_safely(shared.close)  # after the cancels of items that a main thread leaves to it
        pool.shutdown(cancel_futures=True)
