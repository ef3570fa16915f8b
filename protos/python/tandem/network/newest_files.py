"""Values made from files that may be replaced while a process runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from tandem.errors import InvalidConfig
from tandem.process.loaded_files import LOADED

T = TypeVar("T")

_log = structlog.get_logger(__name__)


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
