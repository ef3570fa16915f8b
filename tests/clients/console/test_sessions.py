"""Sessions of browsers: how long they last, and which gives way."""

from __future__ import annotations

import asyncio

import pytest

from tandem.error_codes import Unauthenticated
from tandem_client.channel import ChannelOptions
from tandem_console import sessions as module
from tandem_console.logins import TooManyLogins, TooManySessions
from tandem_console.sessions import IDLE_S, MAX_LOGINS, Sessions


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def quick(server, clock):
    """Sessions whose snapshots follow each other at once."""
    made = Sessions(server.address, ChannelOptions, 0.01, clock=clock)
    yield made
    await made.close()


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

    async def test_closed_sessions_refuse_further_ones(self, sessions):
        """
        Once all were closed a browser gets no watch and no session, since nothing would end it.
        """
        await sessions.close()
        with pytest.raises(Unauthenticated):
            sessions.watch_of(None)
        with pytest.raises(Unauthenticated):
            await sessions.log_in("token")

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

    async def test_polling_ends_with_the_last_page(self, server, sessions, monkeypatch):
        """
        Once no browser has asked for a while, the scheduler is not asked either; the next browser gets a new snapshot.
        """
        monkeypatch.setattr("tandem_console.watch.LINGER_S", 0.0)
        watch = sessions.watch_of(None)
        before = await watch.first()
        await asyncio.wait([watch._task], timeout=60)
        assert watch._task.done()
        num_polls = server.seen.num_polls
        after = await watch.first()
        assert (before.number + 1, num_polls + 1) == (after.number, server.seen.num_polls)

    async def test_open_page_keeps_its_session(self, quick, clock):
        """
        A page that is open uses its session with each snapshot.
        """
        cookie = await quick.log_in("token")
        page = quick.watch_of(cookie).stream()
        await anext(page)
        clock.now_s += IDLE_S - 1
        await anext(page)
        await page.aclose()
        clock.now_s += IDLE_S - 1
        assert quick.has(cookie)

    async def test_session_that_is_over_gives_up_its_token(self, sessions, clock, monkeypatch):
        """
        The connection of a session that is over is closed, also while no browser logs in.
        """
        monkeypatch.setattr(module, "SWEEP_S", 0.0)
        over = sessions.watch_of(await sessions.log_in("over"))
        clock.now_s += IDLE_S
        used = sessions.watch_of(await sessions.log_in("used"))
        sweeping = asyncio.create_task(sessions.sweep_on())
        state = await over._after(1)  # the next snapshot is a minute away
        sweeping.cancel()
        assert isinstance(state.error, Unauthenticated)
        assert (await used.first()).error is None

    async def test_logins_at_once_take_no_place_twice(self, sessions, monkeypatch):
        """
        However many log in at the same time, there are never more sessions than places.
        """
        monkeypatch.setattr(module, "MAX_SESSIONS", 1)
        cookies = [await sessions.log_in("first")]
        cookies += await asyncio.gather(*(sessions.log_in(f"{at}") for at in range(MAX_LOGINS)))
        assert 1 == sum(sessions.has(one) for one in cookies)

    async def test_login_behind_many_is_refused(self, server, sessions, monkeypatch):
        """
        Once as many logins wait as may, the next is refused at once, and those that wait succeed.
        """
        monkeypatch.setattr(module, "MAX_WAITING_LOGINS", 1)
        server.seen.answers_polls.clear()
        waiting = [asyncio.create_task(sessions.log_in(f"{at}")) for at in range(MAX_LOGINS + 1)]
        await asyncio.sleep(0)
        try:
            with pytest.raises(TooManyLogins):
                await sessions.log_in("last")
        finally:
            server.seen.answers_polls.set()
            cookies = await asyncio.gather(*waiting)
        assert all(map(sessions.has, cookies))
