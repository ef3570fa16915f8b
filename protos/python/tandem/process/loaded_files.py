"""Facts about files that a process reads again once they change; no other package is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path


class LoadedFiles:
    """
    Files that a process reads again once they change, and the certificates among them. Any thread
    may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expirations_s: dict[str, float] = {}
        self._is_refused: dict[str, bool] = {}

    def note_certificate(self, certificate: Path, until: datetime) -> None:
        """Note until when the certificate of a file that is in force now is valid."""
        with self._lock:
            self._expirations_s[str(certificate)] = until.timestamp()

    def note_load(self, files: Sequence[Path], *, is_refused: bool) -> None:
        """Note if the newest content of files that belong together could not be used."""
        with self._lock:
            self._is_refused[str(files[0])] = is_refused

    def expirations_s(self) -> dict[str, float]:
        """Return the last valid second, since 1970, of each certificate in force, by its file."""
        with self._lock:
            return dict(self._expirations_s)

    def is_refused(self) -> dict[str, bool]:
        """
        Return if the newest content is refused, and that before it in force, by the first file of
        those that belong together.
        """
        with self._lock:
            return dict(self._is_refused)


LOADED = LoadedFiles()
"""Files of this process."""
