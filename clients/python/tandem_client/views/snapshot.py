"""One snapshot of a server: its statistics, executors, requests and latest activity."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.errors import TandemError
from tandem_client.admin import AdminClient, Stats
from tandem_client.admin.activity import Activity
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.admin.executors import ExecutorSummary
from tandem_client.admin.requests import RequestList
from tandem_client.errors import Unimplemented

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
    calls = _calls(admin, deadline_s)
    try:
        call = next(calls)
        while True:
            try:
                answer = call()
            except TandemError as error:
                call = calls.throw(error)
            else:
                call = calls.send(answer)
    except StopIteration as end:
        return _snapshot(end)


async def take_snapshot_async(admin: AsyncAdminClient, deadline_s: float | None = None) -> Snapshot:
    """Take a snapshot of a server as `take_snapshot` does."""
    calls = _calls(admin, deadline_s)
    try:
        call = next(calls)
        while True:
            try:
                answer = await call()
            except TandemError as error:
                call = calls.throw(error)
            else:
                call = calls.send(answer)
    except StopIteration as end:
        return _snapshot(end)


def _calls(
    admin: AdminClient | AsyncAdminClient, deadline_s: float | None
) -> Generator[Callable[[], Any], Any, Snapshot]:
    """
    Yield the calls of one snapshot, and return it. The answer of each call, or its error, is handed
    back; an answer of asyncio's client is awaited before.
    """
    stats: Stats = yield partial(admin.stats, deadline_s=deadline_s)
    try:
        executors = yield partial(admin.executors, deadline_s=deadline_s)
    except Unimplemented:  # an older server
        executors = ()
    requests = None
    if stats.running_requests + stats.waiting_requests <= MANY_REQUESTS:
        requests = yield partial(
            admin.list_requests, page_size=LISTED_REQUESTS, deadline_s=deadline_s
        )
    try:
        activity = yield partial(admin.activity, max_steps=SHOWN_STEPS, deadline_s=deadline_s)
    except Unimplemented:
        activity = None
    return Snapshot(stats=stats, executors=executors, requests=requests, activity=activity)


def _snapshot(end: StopIteration) -> Snapshot:
    """Return what `_calls` has returned."""
    snapshot: Snapshot = end.value
    return snapshot
