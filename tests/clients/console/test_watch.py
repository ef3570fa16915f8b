"""Snapshots for all browsers with one credential: their end, and bugs of the console."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tandem.error_codes import Unauthenticated
from tandem.errors import InternalError
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.streams.retry import NO_RETRY
from tandem_console import watch as module
from tandem_console.watch import Watch


@pytest.fixture
async def slow(server):
    """A watch whose snapshots are a minute apart."""
    made = Watch(AsyncAdminClient(server.address, retry=NO_RETRY), 60.0)
    yield made
    await made.close()


@pytest.fixture
async def quick(server):
    """A watch whose snapshots follow each other at once."""
    made = Watch(AsyncAdminClient(server.address, retry=NO_RETRY), 0.01)
    yield made
    await made.close()


async def test_end_is_told_to_all_that_wait(slow):
    """
    When a watch is closed, the pages that have it open get a last state that says so, and no snapshot is taken any more.
    """
    pages = [slow.stream() for _ in range(2)]
    for page in pages:
        await anext(page)
    waiting = [asyncio.ensure_future(anext(page)) for page in pages]
    await asyncio.sleep(0)
    await slow.close()
    for state in [*await asyncio.gather(*waiting), await slow.first()]:
        assert isinstance(state.error, Unauthenticated)
        assert state.is_refused
    assert slow._task.done()
    assert [None, None] == [await anext(page, None) for page in pages]


async def test_bug_is_told_and_polling_goes_on(quick, monkeypatch):
    """
    A snapshot that the console cannot make a view of is an internal error on the page, and the next may be well.
    """
    broken = [True]
    view_of = module.view_of

    def fragile(history):
        if broken:
            raise ValueError
        return view_of(history)

    monkeypatch.setattr(module, "view_of", fragile)
    page = quick.stream()
    with capture_logs() as logged:
        states = [await anext(page) for _ in range(3)]
    assert all(isinstance(one.error, InternalError) for one in states)
    assert not any(one.is_refused for one in states)
    assert ["snapshot_broken"] == [one["event"] for one in logged]
    broken.clear()
    while (state := await anext(page)).error is not None:
        pass
    assert state.view is not None
    await page.aclose()
