"""The directory of one scheduler's sockets and files, and the ones that dead schedulers left."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from tandem.temporary import temporary_folder

PREFIX = "tandem-"
CORE_SOCKET = "ipc/core.sock"
"""Where the core and its frontends meet."""
_LOCK = "lock"
_YOUNG_S = 60.0
"""A directory younger than this may not have been locked yet by whoever makes it."""


class ScratchDirectory:
    """
    A directory below the system's temporary one that lives as long as this process.

    It holds a locked file. The system drops the lock with the process, however that ends, so that
    the next scheduler knows which directories nobody needs.
    """

    def __init__(self) -> None:
        """
        Make it, and remove what this user's dead schedulers left beside it.

        Raises:
            InvalidConfig: There is no place for it.
        """
        self.path = temporary_folder(PREFIX, deepest=CORE_SOCKET)
        _remove_abandoned(self.path.parent)
        # Not inherited by child processes: they must not keep the lock alive.
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Delete it with all that is in it; errors are of no interest any more."""
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
    except OSError:  # gone by now, not a directory, or none of ours
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
