"""Temporary directory of one scheduler's sockets and files, and removal of abandoned ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from tandem.process.temporary import temporary_folder

PREFIX = "tandem-"
CORE_SOCKET = "ipc/core.sock"
"""Path, within the directory, of the socket between the core and its frontends."""
_LOCK = "lock"
_YOUNG_S = 60.0
"""Age in seconds below which a directory may not have been locked yet by its scheduler."""


class ScratchDirectory:
    """
    Temporary directory that lives as long as this process.

    It holds a locked file. The system drops the lock when the process ends, in whatever way, so
    the next scheduler can tell which directories are abandoned.
    """

    def __init__(self) -> None:
        """
        Make the directory, and remove those that this user's dead schedulers left beside it.

        Raises:
            InvalidConfig: There is no place for it.
        """
        self.path = temporary_folder(PREFIX, deepest=CORE_SOCKET)
        _remove_abandoned(self.path.parent)
        # Not inherited by child processes: they must not keep the lock alive.
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Delete the directory with all its contents; errors are ignored."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{PREFIX}*"):
        if _is_abandoned(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    try:
        about = directory.lstat()
        if about.st_uid != os.getuid() or time.time() - about.st_mtime < _YOUNG_S:
            return False
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # It is gone by now, is not a directory, or is none of ours.
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
