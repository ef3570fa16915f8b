"""One snapshot of a server: its statistics, executors, requests and latest activity."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tandem_client.admin import AdminClient, Stats
from tandem_client.admin.activity import Activity
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.admin.executors import ExecutorSummary
from tandem_client.admin.requests import RequestList
from tandem_client.errors import Unimplemented

Answer = TypeVar("Answer")

MANY_REQUESTS = 4096
"""Requests from which on they are not listed: listing them takes the server some milliseconds."""
LISTED_REQUESTS = 100
SHOWN_STEPS = 128
"""Newest steps that a view can show; the server would tell twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """
    Answers of a server at one time; they are milliseconds apart.

    Attributes:
        stats: The server's statistics.
        executors: Its executors; none of a server that does not list them.
        requests: Its oldest requests; None = not listed, as there are too many.
        activity: Its latest steps, faults and histograms; None = the server does not tell them.
    """

    stats: Stats
    executors: tuple[ExecutorSummary, ...] = ()
    requests: RequestList | None = None
    activity: Activity | None = None


def take_snapshot(admin: AdminClient, deadline_s: float | None = None) -> Snapshot:
    """
    Take a snapshot of a server.

    Args:
        admin: Connection to its admin port.
        deadline_s: Longest wait for each of four answers in seconds; None = no limit.

    Raises:
        TandemError: The server does not answer, or refuses to.
    """
    taking = _take(admin, deadline_s)
    try:
        taking.send(None)
    except StopIteration as end:
        snapshot: Snapshot = end.value
        return snapshot
    raise AssertionError("a client that blocks had answers to wait for")


async def take_snapshot_async(admin: AsyncAdminClient, deadline_s: float | None = None) -> Snapshot:
    """Take a snapshot of a server as `take_snapshot` does."""
    return await _take(admin, deadline_s)


async def _take(admin: AdminClient | AsyncAdminClient, deadline_s: float | None) -> Snapshot:
    """Take a snapshot; with a client that blocks, this never waits, and ends at its first step."""
    stats = await _answer(admin.stats(deadline_s=deadline_s))
    executors: tuple[ExecutorSummary, ...] = ()
    with suppress(Unimplemented):  # by an older server
        executors = await _answer(admin.executors(deadline_s=deadline_s))
    requests = None
    if stats.running_requests + stats.waiting_requests <= MANY_REQUESTS:
        requests = await _answer(
            admin.list_requests(page_size=LISTED_REQUESTS, deadline_s=deadline_s)
        )
    activity = None
    with suppress(Unimplemented):
        activity = await _answer(admin.activity(max_steps=SHOWN_STEPS, deadline_s=deadline_s))
    return Snapshot(stats=stats, executors=executors, requests=requests, activity=activity)


async def _answer(answer: Answer | Awaitable[Answer]) -> Answer:
    """Return the answer of a call: at once of a client that blocks, awaited of asyncio's."""
    return await answer if isinstance(answer, Awaitable) else answer
