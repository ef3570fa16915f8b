"""
Values made from files that may be replaced while a process runs, and what is told of these files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from tandem.errors import InvalidConfig

T = TypeVar("T")

_log = structlog.get_logger(__name__)


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


class NewestFiles(Generic[T]):
    """
    Value that is made from files, and made again once one of them has changed. If that fails, the
    failure is logged once and the value stays. Any thread may call it.

    Attributes:
        value: The newest value that could be made.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], T]) -> None:
        """
        Args:
            paths: The files.
            make: Makes the value from them.

        Raises:
            InvalidConfig: `make` raised it.
        """
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self.value = make()
        LOADED.note_load(paths, is_refused=False)

    def changed(self) -> T | None:
        """Return the new value if a file has changed; None if none has, or the change is broken."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self.value = self._make()
            except InvalidConfig as error:
                _log.error("files_refused", message=error.message, kept="those before them")
                LOADED.note_load(self._paths, is_refused=True)
                return None
            LOADED.note_load(self._paths, is_refused=False)
            _log.info("files_reloaded", files=[str(path) for path in self._paths])
            return self.value

    def newest(self) -> T:
        """Return the value, made again if a file has changed."""
        self.changed()
        return self.value

    def _stamp_now(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()  # of the file itself: Kubernetes swaps links that lead to it
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
