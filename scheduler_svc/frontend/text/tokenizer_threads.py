"""Threads for tokenization that takes too long for the event loop, with a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.errors import QueueFull

_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class _Job:
    """Work of a tenant, and the future that gets its result."""

    tenant: str
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class TokenizerThreads:
    """
    Pool of threads for work on text, for which tenants take turns. Owned by the event loop.

    While all places are taken, a tenant that has its share of them gets no other, and one that has
    less is not refused because of others. As clients may name any tenant where no credentials are
    asked for, there are never more than twice as many jobs as places.
    """

    def __init__(self, num_threads: int, *, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._num_threads = num_threads
        self._max_inside = num_threads + max_waiting
        self._num_running = 0
        self._num_inside = 0
        self._inside: Counter[str] = Counter()
        """Jobs of each tenant that run or wait."""
        self._waiting: dict[str, deque[_Job]] = {}
        """Jobs that wait by tenant; the tenant of the next turn is first."""

    async def run(self, work: Callable[[], _Result], *, tenant: str = "") -> _Result:
        """
        Run `work` on a thread, in the tenant's turn, and return its result.

        Raises:
            QueueFull: Too many calls wait already, and the tenant has its share of them.
        """
        self._check(tenant)
        job = _Job(tenant, work, asyncio.get_running_loop().create_future())
        self._num_inside += 1
        self._inside[tenant] += 1
        self._waiting.setdefault(tenant, deque()).append(job)
        self._start_next()
        try:
            result: _Result = await job.done
        except asyncio.CancelledError:
            self._drop(job)
            raise
        return result

    def _check(self, tenant: str) -> None:
        if self._num_inside < self._max_inside:
            return
        num_tenants = len(self._inside) + (tenant not in self._inside)
        has_share = self._inside[tenant] >= max(1, self._max_inside // num_tenants)
        if has_share or self._num_inside >= 2 * self._max_inside:
            raise QueueFull(
                f"{self._num_inside} prompts wait to be tokenized: try again in a moment",
                metadata={"limit": "max_waiting_prompts"},
            )

    def _start_next(self) -> None:
        """Give free threads the next jobs."""
        while self._waiting and self._num_running < self._num_threads:
            tenant = next(iter(self._waiting))
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs
            self._start(job)

    def _start(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        running = self._pool.submit(job.work)
        self._num_running += 1

        def end() -> None:
            self._num_running -= 1
            self._leave(job)
            if not job.done.done():
                error = running.exception()
                if error is None:
                    job.done.set_result(running.result())
                else:
                    job.done.set_exception(error)
            self._start_next()

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is stopping
                loop.call_soon_threadsafe(end)

        # The job counts until the thread is done with it, even if the caller was cancelled before.
        running.add_done_callback(ended)

    def _drop(self, job: _Job) -> None:
        """Remove a job whose caller was cancelled, unless it runs."""
        jobs = self._waiting.get(job.tenant)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.tenant]
        self._leave(job)

    def _leave(self, job: _Job) -> None:
        self._num_inside -= 1
        self._inside[job.tenant] -= 1
        if not self._inside[job.tenant]:
            del self._inside[job.tenant]

    def close(self) -> None:
        """Drop work that has not begun, and take no more."""
        for jobs in self._waiting.values():
            for job in jobs:
                job.done.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
