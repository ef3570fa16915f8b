"""The credentials in force: read at the start, and again when the file changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.frontend.identity.credential_table import CredentialTable
from scheduler_svc.frontend.identity.credentials_file import read_credentials
from scheduler_svc.frontend.identity.identity import Caller, Role
from tandem.error_codes import Unauthenticated
from tandem.network.newest_files import NewestFiles

LOOK_INTERVAL_S = 1.0
"""Seconds from one look for a changed file to the next; calls make it, and their ends await it."""

Find = Callable[[CredentialTable], Caller | None]
"""Function that looks a call's proof up in a table of credentials."""


@dataclass(eq=False, slots=True)
class _LiveCall:
    """
    Call that is being served.

    Attributes:
        find: Looks its proof up.
        caller: What the proof stood for when the call began.
        role: What it must allow.
        task: Task that serves the call.
        error: Error with which it ends since its credential is no longer in force.
    """

    find: Find
    caller: Caller
    role: Role
    task: asyncio.Task[object]
    error: Unauthenticated | None = None


class CredentialStore:
    """Credentials of a file that may be replaced meanwhile. Owned by the event loop."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Raises:
            InvalidConfig: The file cannot be used.
        """
        self._newest = NewestFiles([path], lambda: read_credentials(path))
        self._clock = clock
        self._unix_clock = unix_clock
        self._live: set[_LiveCall] = set()
        self._is_watching = False
        self._next_look_s = clock() + LOOK_INTERVAL_S

    def table(self) -> CredentialTable:
        """
        Return the newest usable credentials. A changed file that cannot be used is logged once, and
        the credentials before it stay in force.
        """
        now_s = self._clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_INTERVAL_S
            self._newest.changed()
        return self._newest.value

    def caller(self, find: Find) -> Caller | None:
        """
        Return the caller that a proof stands for now; None if it is unknown.

        Raises:
            Unauthenticated: The credential has expired.
        """
        found = find(self.table())
        if found is not None:
            found.identity.check_not_expired(self._unix_clock())
        return found

    @contextmanager
    def holding(self, caller: Caller, find: Find, role: Role) -> Iterator[None]:
        """
        Serve a call in the block, which must be left by the task that entered it; the block is
        cancelled once the credential is no longer in force, within `LOOK_INTERVAL_S`.

        Raises:
            Unauthenticated: That was the case: the credential was withdrawn, has expired, or lost
                its tenant or the role.
        """
        task = asyncio.current_task()
        assert task is not None
        call = _LiveCall(find, caller, role, task)
        self._live.add(call)
        if not self._is_watching:
            self._is_watching = True
            asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._watch)
        try:
            yield
        except asyncio.CancelledError:
            if call.error is None:
                raise
            task.uncancel()
            raise call.error from None
        finally:
            self._live.discard(call)

    def _watch(self) -> None:
        """End the calls whose credential is no longer in force; look again while any is live."""
        table = self.table()
        for call in self._live:
            if call.error is None and (error := self._why_over(call, table)) is not None:
                call.error = error
                call.task.cancel()
        self._is_watching = bool(self._live)
        if self._is_watching:
            asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._watch)

    def _why_over(self, call: _LiveCall, table: CredentialTable) -> Unauthenticated | None:
        now, before = call.find(table), call.caller.identity
        if now is None:
            return Unauthenticated(f"the credential {before.name!r} was withdrawn")
        if now.identity.tenant != before.tenant or call.role not in now.identity.roles:
            return Unauthenticated(f"the rights of the credential {before.name!r} were changed")
        try:
            now.identity.check_not_expired(self._unix_clock())
        except Unauthenticated as error:
            return error
        return None
