"""Messages on their way out of one call of the step link, one at a time and in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class OutgoingMessages:
    """
    Begins to send a message when the one before has left; any thread may put one, and none waits.

    gRPC takes one message of a call at a time and tells when it took it. Its own streams give that
    news to a thread which waits to send the next one: two threads more to wake for each message.
    """

    def __init__(self, begin: Callable[[bytes], None]) -> None:
        """
        Args:
            begin: Begins to send a message; `left` is called when it has left, or never will.
        """
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._is_sending = False
        self._is_closed = False
        self._on_empty: Callable[[], None] | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing is being sent or waits for it."""
        return not self._is_sending

    def put(self, message: bytes) -> None:
        """Send a message after those before it; dropped once closed."""
        with self._lock:
            if self._is_closed:
                return
            if self._is_sending:
                self._waiting.append(message)
                return
            self._is_sending = True
        self._begin(message)

    def left(self) -> None:
        """Note that the message begun last has left; begins the next one."""
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
        """Take no more messages; `on_empty` is called once all have left, maybe at once."""
        with self._lock:
            self._is_closed = True
            self._on_empty = on_empty
            is_empty = not self._is_sending
        if is_empty:
            on_empty()

    def drop(self) -> None:
        """Take no more messages and forget those that wait: the call is over."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
