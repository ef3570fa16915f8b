"""The credentials in force: read at the start, and again when the file changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scheduler_svc.frontend.identity.credential_table import CredentialTable
from scheduler_svc.frontend.identity.credentials_file import read_credentials
from tandem.network.newest_files import NewestFiles

LOOK_INTERVAL_S = 1.0
"""Seconds from one look for a changed file to the next; a look is made by the next call."""


class CredentialStore:
    """Credentials of a file that may be replaced meanwhile. Owned by the event loop."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """
        Raises:
            InvalidConfig: The file cannot be used.
        """
        self._newest = NewestFiles([path], lambda: read_credentials(path))
        self._clock = clock
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
