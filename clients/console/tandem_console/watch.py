"""A scheduler watched with one credential, for all browsers that have it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from tandem.error_codes import DeadlineExceeded, TandemError, Unauthenticated
from tandem.errors import InternalError
from tandem.status import CallCancelled
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.streams.retry import is_transient
from tandem_client.views.look import Look, take_look_async
from tandem_client.views.looks import Looks
from tandem_client.views.model import as_plain, view_of

LOOK_S = 5.0
"""Longest wait in seconds for each answer of one look; then the next look begins."""
LINGER_S = 30.0
"""Seconds for which looking goes on after the last browser has left, so that plots go on too."""
ENDED = "this session has ended: log in again"
BROKEN = "the console could not make a view of the scheduler's answer, and looks again: see its log"

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """
    Newest view of the scheduler, and the failure of the newest look if it failed.

    Attributes:
        number: Number of the look, from 1; one that failed counts too.
        view: The newest view for JSON; None before the first answer.
        at_s: Time of the view, in seconds since 1970; 0 before the first.
        error: Failure of the newest look; None where it was answered.
        is_refused: True if further looks would fail likewise, so that none is taken.
    """

    number: int = 0
    view: dict[str, Any] | None = None
    at_s: float = 0.0
    error: TandemError | None = None
    is_refused: bool = False


class Watch:
    """Looks at a scheduler while browsers want them. Owned by the server's event loop."""

    def __init__(
        self,
        admin: AsyncAdminClient,
        interval_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            admin: Connection with the credential; closed by `close`.
            interval_s: Seconds between two looks.
            clock: Returns seconds.
        """
        self._admin = admin
        self._interval_s = interval_s
        self._clock = clock
        self._looks: Looks | None = None
        self._sight = Sight()
        self._old = 0
        """Number of the last look of an earlier time in which looks were taken."""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.used_s = clock()
        """Last time at which a browser asked."""
        self.num_streams = 0
        """Streams of looks that are open."""

    async def first(self) -> Sight:
        """Return the newest sight; where no looks were being taken, the one of a new look."""
        self._keep_looking()
        is_new = self._sight.number > self._old
        return self._sight if is_new else await self._after(self._old)

    async def stream(self) -> AsyncGenerator[Sight, None]:
        """
        Yield the newest sight now and after each look; ends after a look that was refused, and
        after `close`.
        """
        self.num_streams += 1
        try:
            sight = await self.first()
            yield sight
            while not sight.is_refused:
                self._keep_looking()
                sight = await self._after(sight.number)
                yield sight
        finally:
            self.num_streams -= 1
            self.used_s = self._clock()

    async def close(self) -> None:
        """Stop looking, tell that to all that still wait for a look, and close the connection."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._show(
            Sight(number=self._sight.number + 1, error=Unauthenticated(ENDED), is_refused=True)
        )
        await self._admin.close()

    @property
    def _is_looking(self) -> bool:
        return self._task is not None and not self._task.done()

    def _keep_looking(self) -> None:
        self.used_s = self._clock()
        if not self._is_looking and not self._is_closed:
            self._old = self._sight.number
            self._task = asyncio.create_task(self._look_on())

    async def _after(self, number: int) -> Sight:
        async with self._changed:
            await self._changed.wait_for(lambda: self._sight.number > number)
            return self._sight

    async def _show(self, sight: Sight) -> None:
        async with self._changed:
            self._sight = sight
            self._changed.notify_all()

    async def _look_on(self) -> None:
        """Look until no browser has asked for a while, and at least once: a browser waits."""
        while True:
            sight = await self._look()
            await self._show(sight)
            is_wanted = self.num_streams or self._clock() - self.used_s < LINGER_S
            if sight.is_refused or not is_wanted or self._is_closed:
                return
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> Sight:
        number = self._sight.number + 1
        try:
            look = await take_look_async(self._admin, LOOK_S)
            view = as_plain(view_of(self._seen(look)))
        except TandemError as error:
            may_pass = is_transient(error) or isinstance(error, (CallCancelled, DeadlineExceeded))
            return replace(self._sight, number=number, error=error, is_refused=not may_pass)
        except Exception:  # noqa: BLE001  # a bug: browsers would else wait for ever
            before = self._sight.error
            if before is None or before.message != BROKEN:
                _log.exception("look_broken")
            self._looks = None  # the looks before may be what it stumbles over
            return replace(self._sight, number=number, error=InternalError(BROKEN))
        return Sight(number=number, view=view, at_s=time.time())

    def _seen(self, look: Look) -> Looks:
        if self._looks is None:
            self._looks = Looks(look, self._interval_s)
        else:
            self._looks.add(look)
        return self._looks
