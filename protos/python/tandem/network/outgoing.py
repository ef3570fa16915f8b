"""Queue of outgoing messages of one call of the step link, sent one at a time and in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class OutgoingMessages:
    """
    Outgoing messages, each begun when the one before has left; any thread may put one, and no
    thread waits.

    gRPC takes one message of a call at a time and reports when it took it. Its own streams report
    that to a thread which waits to send the next one, so that two more threads are woken for each
    message.
    """

    def __init__(self, begin: Callable[[bytes], None]) -> None:
        """
        Args:
            begin: Begins to send a message; `left` must be called when the message has left or can
                no longer leave.
        """
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._is_sending = False
        self._is_closed = False
        self._on_empty: Callable[[], None] | None = None

    @property
    def is_empty(self) -> bool:
        """True if no message is being sent or waits to be sent."""
        return not self._is_sending

    def put(self, message: bytes) -> None:
        """Send a message after those before it; once closed, drop it."""
        with self._lock:
            if self._is_closed:
                return
            if self._is_sending:
                self._waiting.append(message)
                return
            self._is_sending = True
        self._begin(message)

    def left(self) -> None:
        """Note that the last message begun has left, and begin the next one."""
        with self._lock:
            if self._waiting:
                message = self._waiting.popleft()
                on_empty = None
            else:
                message = None
                self._is_sending = False
                on_empty = self._on_empty
        if message is not None:
            self._begin(message)
        elif on_empty is not None:
            on_empty()

    def close(self, on_empty: Callable[[], None]) -> None:
        """Take no more messages; `on_empty` is called once all have left, or at once."""
        with self._lock:
            self._is_closed = True
            self._on_empty = on_empty
            is_empty = not self._is_sending
        if is_empty:
            on_empty()

    def drop(self) -> None:
        """Take no more messages and drop those that wait, as the call is over."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
