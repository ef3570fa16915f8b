"""Sessions of browsers: each has a cookie, and the watch of the token that it logged in with."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.error_codes import TandemError
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.channel import ChannelOptions
from tandem_client.streams.retry import NO_RETRY
from tandem_console.encryption import with_token
from tandem_console.watch import Watch

IDLE_S = 8 * 3600.0
"""Seconds after its last use at which a session ends."""
MAX_SESSIONS = 64
MAX_LOGINS = 4
"""Logins that are tried at once; the others wait."""


class TooManySessions(Exception):
    """Every session has an open page, so that none can give way to another."""


@dataclass(slots=True, eq=False)
class _Session:
    watch: Watch
    used_s: float


class Sessions:
    """
    Sessions by the hashes of their cookies, and the watch without a token, for browsers without a
    session: the scheduler serves them or refuses. Owned by the server's event loop.
    """

    def __init__(
        self,
        admin_address: str,
        options: Callable[[], ChannelOptions],
        interval_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            admin_address: The scheduler's address for operators.
            options: Returns the settings of a new connection, without a token.
            interval_s: Seconds between two looks.
            clock: Returns seconds.
        """
        self._address = admin_address
        self._options = options
        self._interval_s = interval_s
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._logins = asyncio.Semaphore(MAX_LOGINS)
        self._open: Watch | None = None

    def watch_of(self, cookie: str | None) -> Watch:
        """Return the watch of a session; without a valid one, the watch that has no token."""
        if cookie is not None and self.has(cookie):
            session = self._sessions[_hash(cookie)]
            session.used_s = self._clock()
            return session.watch
        if self._open is None:
            # An empty token: the environment of this process must not vouch for a browser.
            self._open = self._watch("")
        return self._open

    def has(self, cookie: str | None) -> bool:
        """Return True if a cookie is that of a session that has not ended."""
        session = None if cookie is None else self._sessions.get(_hash(cookie))
        return session is not None and self._clock() - session.used_s < IDLE_S

    async def log_in(self, token: str) -> str:
        """
        Open a session for a token with which the scheduler answers; return its cookie.

        Raises:
            TandemError: The scheduler refuses the token, or does not answer.
            TooManySessions: There is no room for another session.
        """
        async with self._logins:
            watch = self._watch(token)
            try:
                sight = await watch.first()
                if sight.error is not None:
                    raise sight.error
                await self._make_room()
            except (TandemError, TooManySessions, asyncio.CancelledError):
                await watch.close()
                raise
            cookie = secrets.token_urlsafe(32)
            self._sessions[_hash(cookie)] = _Session(watch, self._clock())
            return cookie

    async def log_out(self, cookie: str | None) -> None:
        """End a session, if there is such a one."""
        session = None if cookie is None else self._sessions.pop(_hash(cookie), None)
        if session is not None:
            await session.watch.close()

    async def close(self) -> None:
        """End all sessions."""
        watches = [one.watch for one in self._sessions.values()]
        self._sessions.clear()
        for watch in [*watches, *([] if self._open is None else [self._open])]:
            await watch.close()

    def _watch(self, token: str) -> Watch:
        options = with_token(self._options(), token)
        admin = AsyncAdminClient(self._address, retry=NO_RETRY, options=options)
        return Watch(admin, self._interval_s)

    async def _make_room(self) -> None:
        """End sessions that are over; if none is, the one that has been idle longest."""
        now = self._clock()
        for key, one in list(self._sessions.items()):
            if now - one.used_s >= IDLE_S and not one.watch.num_streams:
                del self._sessions[key]
                await one.watch.close()
        if len(self._sessions) < MAX_SESSIONS:
            return
        idle = [key for key, one in self._sessions.items() if not one.watch.num_streams]
        if not idle:
            raise TooManySessions
        oldest = self._sessions.pop(min(idle, key=lambda key: self._sessions[key].used_s))
        await oldest.watch.close()


def _hash(cookie: str) -> str:
    # A look-up by the hash takes the same time whatever part of a guessed cookie is right.
    return hashlib.sha256(cookie.encode("utf-8", "replace")).hexdigest()
