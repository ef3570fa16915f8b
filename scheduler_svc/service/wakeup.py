"""Wakeup of the core thread's poll by other threads."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """
    File descriptor that is readable from `set` to `clear`.

    `set` may be called from any thread and from a signal handler and never waits; only the polling
    thread calls `clear`, before it looks at what it was woken for.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, for registration with a poller."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the poller; when the pipe is full it is readable already."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Release both ends; a late `set` does nothing."""
        self._reader.close()
        self._writer.close()
