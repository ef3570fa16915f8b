"""The credentials in force: read at the start, and again when the file changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from scheduler_svc.frontend.identity.credential_table import CredentialTable
from scheduler_svc.frontend.identity.credentials_file import read_credentials
from tandem.errors import InvalidConfig

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

LOOK_INTERVAL_S = 1.0
"""Seconds from one look for a changed file to the next; a look is made by the next call."""

Stamp = tuple[int, int, int] | None


class CredentialStore:
    """Credentials of a file that may be replaced meanwhile. Owned by the event loop."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """
        Raises:
            InvalidConfig: The file cannot be used.
        """
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._table = read_credentials(path)
        self._next_look_s = clock() + LOOK_INTERVAL_S

    def table(self) -> CredentialTable:
        """
        Return the newest usable credentials. A changed file that cannot be used is logged once, and
        the credentials before it stay in force.
        """
        now_s = self._clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_INTERVAL_S
            self._look()
        return self._table

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = read_credentials(self._path)
        except InvalidConfig as error:
            _log.error("tokens_file_refused", message=error.message, kept="the one before it")
            return
        _log.info("tokens_file_reloaded", num_credentials=self._table.num_credentials)


def _stamp(path: Path) -> Stamp:
    """Return what changes with the file; links are followed, as Kubernetes swaps them."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
