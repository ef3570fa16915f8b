"""Sessions of browsers: each has a cookie, and the watch of the token that it logged in with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from tandem.error_codes import TandemError, Unauthenticated
from tandem.errors import InvalidConfig
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.channel import ChannelOptions
from tandem_client.streams.retry import NO_RETRY
from tandem_console.logins import (
    LoginRefused,
    NoTokensAsked,
    TooManyLogins,
    TooManySessions,
    UnusableToken,
)
from tandem_console.watch import ENDED, Watch

IDLE_S = 8 * 3600.0
"""Seconds after its last use at which a session ends."""
MAX_SESSIONS = 64
MAX_LOGINS = 4
"""Logins that are tried at once; the others wait."""
MAX_WAITING_LOGINS = 16
SWEEP_S = 60.0
"""Seconds between two searches for sessions that are over."""
NO_SESSION = "log in: the certificate of this console vouches for no browser"


class Sessions:
    """
    Watches of sessions by the hashes of their cookies, and the watch without a token, for browsers
    without a session: the scheduler serves them or refuses. Where this console shows the scheduler
    a certificate there is no such watch, since the scheduler would serve the certificate. Owned by
    the server's event loop.
    """

    def __init__(
        self,
        admin_address: str,
        options: Callable[[], ChannelOptions],
        interval_s: float,
        *,
        asks_login: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            admin_address: The scheduler's address for operators.
            options: Returns the settings of a new connection, without a token.
            interval_s: Seconds between two snapshots.
            asks_login: True if connections have a certificate, which must not vouch for a browser:
                each needs a session, and the scheduler must refuse tokens that it does not know.
            clock: Returns seconds.
        """
        self._address = admin_address
        self._options = options
        self._interval_s = interval_s
        self._asks_login = asks_login
        self._clock = clock
        self._sessions: dict[str, Watch] = {}
        self._logins = asyncio.Semaphore(MAX_LOGINS)
        self._num_logins = 0
        """Logins that are tried, or wait."""
        self._open: Watch | None = None
        """The watch without a token; None before its first use."""
        self._is_closed = False

    def watch_of(self, cookie: str | None) -> Watch:
        """
        Return the watch of a session; without a valid one, the watch that has no token.

        Raises:
            Unauthenticated: There is no session, and this console asks for one; or it stops.
        """
        self._check_open()
        if cookie is not None and self.has(cookie):
            watch = self._sessions[_hash(cookie)]
            watch.used_s = self._clock()
            return watch
        if self._asks_login:
            raise Unauthenticated(NO_SESSION)
        if self._open is None:
            # An empty token: the environment of this process must not vouch for a browser.
            self._open = self._watch("")
        return self._open

    def has(self, cookie: str | None) -> bool:
        """Return True if a cookie is that of a session that has not ended."""
        watch = None if cookie is None else self._sessions.get(_hash(cookie))
        return watch is not None and not self._is_over(watch)

    async def log_in(self, token: str) -> str:
        """
        Open a session for a token with which the scheduler answers; return its cookie.

        Raises:
            TandemError: The scheduler refuses the token, or does not answer.
            LoginRefused: The token cannot be sent or proves nothing; or there is no room for
                another login or session.
        """
        async with self._turn():
            watch = self._watch(token)
            try:
                await self._check(watch)
                self._check_open()
                gone = self._make_room()
            except (LoginRefused, TandemError, asyncio.CancelledError) as error:
                await watch.close()
                if isinstance(error, InvalidConfig):
                    raise UnusableToken from None
                raise
            cookie = secrets.token_urlsafe(32)
            # Before the next wait: another login would else count on the same place.
            self._sessions[_hash(cookie)] = watch
            for one in gone:
                await one.close()
            return cookie

    async def log_out(self, cookie: str | None) -> None:
        """End a session, if there is such a one."""
        watch = None if cookie is None else self._sessions.pop(_hash(cookie), None)
        if watch is not None:
            await watch.close()

    async def sweep_on(self) -> None:
        """End sessions that are over, again and again: their tokens stay in memory no longer."""
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """End sessions that are over."""
        for one in self._take_ended():
            await one.close()

    async def close(self) -> None:
        """End all sessions, and refuse further ones; a second time it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        watches = list(self._sessions.values())
        self._sessions.clear()
        for watch in [*watches, *([] if self._open is None else [self._open])]:
            await watch.close()

    def _check_open(self) -> None:
        """Raise an error once the sessions were closed: nothing would close another watch."""
        if self._is_closed:
            raise Unauthenticated(ENDED)

    def _watch(self, token: str) -> Watch:
        options = replace(self._options(), api_key=token)  # an empty token: calls have none
        admin = AsyncAdminClient(self._address, retry=NO_RETRY, options=options)
        return Watch(admin, self._interval_s, clock=self._clock)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until a login may be tried."""
        if self._num_logins >= MAX_LOGINS + MAX_WAITING_LOGINS:
            raise TooManyLogins
        self._num_logins += 1
        try:
            async with self._logins:
                yield
        finally:
            self._num_logins -= 1

    async def _check(self, watch: Watch) -> None:
        """Raise an error unless the scheduler answers a token, and would refuse others."""
        state = await watch.first()
        if state.error is not None:
            raise state.error
        if not self._asks_login:
            return
        guess = self._watch(secrets.token_urlsafe(32))
        try:
            guessed = await guess.first()
        finally:
            await guess.close()
        if guessed.error is None:
            raise NoTokensAsked
        if not isinstance(guessed.error, Unauthenticated):
            raise guessed.error

    def _is_over(self, watch: Watch) -> bool:
        return not watch.num_streams and self._clock() - watch.used_s >= IDLE_S

    def _take_ended(self) -> list[Watch]:
        """Take out the sessions that are over; return their watches, to be closed."""
        over = [key for key, watch in self._sessions.items() if self._is_over(watch)]
        return [self._sessions.pop(key) for key in over]

    def _make_room(self) -> list[Watch]:
        """Take out sessions that are over; if no place is free, the one that is idle longest."""
        gone = self._take_ended()
        if len(self._sessions) >= MAX_SESSIONS:
            idle = [key for key, watch in self._sessions.items() if not watch.num_streams]
            if not idle:
                raise TooManySessions
            gone.append(self._sessions.pop(min(idle, key=lambda key: self._sessions[key].used_s)))
        return gone


def _hash(cookie: str) -> str:
    # A look-up by the hash takes the same time whatever part of a guessed cookie is right.
    return hashlib.sha256(cookie.encode("utf-8", "replace")).hexdigest()
