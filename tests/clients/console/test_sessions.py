"""Sessions of browsers: how long they last, and which gives way."""

from __future__ import annotations

import asyncio

import pytest

from tandem_client.channel import ChannelOptions
from tandem_console import sessions as module
from tandem_console.sessions import IDLE_S, Sessions, TooManySessions


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def sessions(server, clock):
    """Sessions in front of a fake scheduler that takes any token."""
    made = Sessions(server.address, ChannelOptions, 60.0, clock=clock)
    yield made
    await made.close()


class TestSessions:
    async def test_unused_session_ends(self, sessions, clock):
        """
        A cookie opens its own watch until it was not used for the idle time.
        """
        cookie = await sessions.log_in("token")
        clock.now_s += IDLE_S - 1
        watch = sessions.watch_of(cookie)
        clock.now_s += IDLE_S - 1
        assert watch is sessions.watch_of(cookie)
        clock.now_s += IDLE_S
        assert watch is not sessions.watch_of(cookie)
        assert sessions.watch_of(None) is sessions.watch_of(cookie)

    async def test_full_house_drops_the_session_idle_longest(self, sessions, clock, monkeypatch):
        """
        With all places taken, the session that was idle longest ends, unless it has an open page.
        """
        monkeypatch.setattr(module, "MAX_SESSIONS", 2)
        first = await sessions.log_in("first")
        clock.now_s += 1
        second = await sessions.log_in("second")
        page = sessions.watch_of(first).stream()
        await anext(page)
        clock.now_s += 1
        third = await sessions.log_in("third")
        assert [True, False, True] == [sessions.has(one) for one in (first, second, third)]

        other = sessions.watch_of(third).stream()
        await anext(other)
        with pytest.raises(TooManySessions):
            await sessions.log_in("fourth")
        await page.aclose()
        await other.aclose()

    async def test_looking_ends_with_the_last_page(self, server, sessions, monkeypatch):
        """
        Once no browser has asked for a while, the scheduler is not asked either; the next browser gets a new look.
        """
        monkeypatch.setattr("tandem_console.watch.LINGER_S", 0.0)
        watch = sessions.watch_of(None)
        before = await watch.first()
        await asyncio.wait([watch._task], timeout=60)
        assert watch._task.done()
        num_looks = server.seen.num_looks
        after = await watch.first()
        assert (before.number + 1, num_looks + 1) == (after.number, server.seen.num_looks)
