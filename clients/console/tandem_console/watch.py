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
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import as_plain, view_of
from tandem_client.views.snapshot import Snapshot, take_snapshot_async

ANSWER_S = 5.0
"""Longest wait in seconds for each answer of one snapshot; then the next snapshot begins."""
LINGER_S = 30.0
"""Seconds for which polling goes on after the last browser has left, so that plots go on too."""
ENDED = "this session has ended: log in again"
BROKEN = "the console could not make a view of the scheduler's answer, and polls again: see its log"

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchState:
    """
    Newest view of the scheduler, and the failure of the newest snapshot if it failed.

    Attributes:
        number: Number of the snapshot, from 1; one that failed counts too.
        view: The newest view for JSON; None before the first answer.
        at_s: Time of the view, in seconds since 1970; 0 before the first.
        error: Failure of the newest snapshot; None where it was answered.
        is_refused: True if further snapshots would fail likewise, so that none is taken.
    """

    number: int = 0
    view: dict[str, Any] | None = None
    at_s: float = 0.0
    error: TandemError | None = None
    is_refused: bool = False


class Watch:
    """Polling of a scheduler while browsers want it. Owned by the server's event loop."""

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
            interval_s: Seconds between two snapshots.
            clock: Returns seconds.
        """
        self._admin = admin
        self._interval_s = interval_s
        self._clock = clock
        self._history: SnapshotHistory | None = None
        self._state = WatchState()
        self._old = 0
        """Number of the last snapshot of an earlier time of polling."""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.used_s = clock()
        """Last time at which a browser asked."""
        self.num_streams = 0
        """Streams of snapshots that are open."""

    async def first(self) -> WatchState:
        """Return the newest state; after a time without polling, that of a new snapshot."""
        self._keep_polling()
        is_new = self._state.number > self._old
        return self._state if is_new else await self._after(self._old)

    async def stream(self) -> AsyncGenerator[WatchState, None]:
        """
        Yield the newest state now and after each snapshot; ends after a refused snapshot and
        after `close`.
        """
        self.num_streams += 1
        try:
            state = await self.first()
            yield state
            while not state.is_refused:
                self._keep_polling()
                state = await self._after(state.number)
                yield state
        finally:
            self.num_streams -= 1
            self.used_s = self._clock()

    async def close(self) -> None:
        """Stop polling, tell all that still wait for a snapshot, and close the connection."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._show(
            WatchState(number=self._state.number + 1, error=Unauthenticated(ENDED), is_refused=True)
        )
        await self._admin.close()

    @property
    def _is_polling(self) -> bool:
        return self._task is not None and not self._task.done()

    def _keep_polling(self) -> None:
        self.used_s = self._clock()
        if not self._is_polling and not self._is_closed:
            self._old = self._state.number
            self._task = asyncio.create_task(self._poll())

    async def _after(self, number: int) -> WatchState:
        async with self._changed:
            await self._changed.wait_for(lambda: self._state.number > number)
            return self._state

    async def _show(self, state: WatchState) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    async def _poll(self) -> None:
        """Poll until no browser has asked for a while, and at least once: a browser waits."""
        while True:
            state = await self._take()
            await self._show(state)
            is_wanted = self.num_streams or self._clock() - self.used_s < LINGER_S
            if state.is_refused or not is_wanted or self._is_closed:
                return
            await asyncio.sleep(self._interval_s)

    async def _take(self) -> WatchState:
        number = self._state.number + 1
        try:
            snapshot = await take_snapshot_async(self._admin, ANSWER_S)
            view = as_plain(view_of(self._seen(snapshot)))
        except TandemError as error:
            may_pass = is_transient(error) or isinstance(error, (CallCancelled, DeadlineExceeded))
            return replace(self._state, number=number, error=error, is_refused=not may_pass)
        except Exception:  # noqa: BLE001  # a bug: browsers would else wait for ever
            before = self._state.error
            if before is None or before.message != BROKEN:
                _log.exception("snapshot_broken")
            self._history = None  # the snapshots before may be what it stumbles over
            return replace(self._state, number=number, error=InternalError(BROKEN))
        return WatchState(number=number, view=view, at_s=time.time())

    def _seen(self, snapshot: Snapshot) -> SnapshotHistory:
        if self._history is None:
            self._history = SnapshotHistory(snapshot, self._interval_s)
        else:
            self._history.add(snapshot)
        return self._history
