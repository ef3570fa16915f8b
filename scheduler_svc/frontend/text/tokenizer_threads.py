"""Threads for tokenization that takes too long for the event loop, with a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.errors import QueueFull

_Result = TypeVar("_Result")


class TokenizerThreads:
    """Pool of threads for work on text. Owned by the event loop."""

    def __init__(self, num_threads: int, *, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._max_inside = num_threads + max_waiting
        self._num_inside = 0

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """
        Run `work` on a thread, and return its result.

        Raises:
            QueueFull: Too many calls wait already.
        """
        if self._num_inside >= self._max_inside:
            raise QueueFull(
                f"{self._num_inside} prompts wait to be tokenized: try again in a moment",
                metadata={"limit": "max_waiting_prompts"},
            )
        self._num_inside += 1
        try:
            future = self._pool.submit(work)
        except BaseException:
            self._num_inside -= 1
            raise
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is stopping
                loop.call_soon_threadsafe(self._leave)

        # The call counts until the thread is done with it, even if the caller was cancelled before.
        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def _leave(self) -> None:
        self._num_inside -= 1

    def close(self) -> None:
        """Drop work that has not begun, and take no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
