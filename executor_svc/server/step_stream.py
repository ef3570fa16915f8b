"""One Execute stream as seen from inside: what is to be sent, and how it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tandem.errors import SessionLost, TandemError
from tandem.outgoing import OutgoingMessages

ATTACH_DEADLINE_S = 10.0
"""A stream that has not attached by then is ended: it would hold a server thread for nothing."""


class StepStream:
    """
    Any thread puts messages or ends the stream; one server thread waits for its end.

    Attributes:
        outgoing: Sends the messages.
        session_epoch: Set when the stream attaches; 0 before.
        attach_id: Likewise.
    """

    def __init__(self, begin: Callable[[bytes], None]) -> None:
        """
        Args:
            begin: Begins to send an encoded message; `outgoing.left` tells that it left.
        """
        self.session_epoch = 0
        self.attach_id = 0
        self.outgoing = OutgoingMessages(begin)
        self._ends: queue.SimpleQueue[TandemError | None] = queue.SimpleQueue()

    @property
    def is_idle(self) -> bool:
        """Nothing is being sent or waits for it."""
        return self.outgoing.is_empty

    def put(self, message: bytes) -> None:
        """Send an encoded message after those before it; dropped once the stream has ended."""
        self.outgoing.put(message)

    def end(self, error: TandemError | None = None) -> None:
        """End the stream after what waits to be sent, with an error or, without one, with OK."""
        self._ends.put(error)

    def wait(self) -> None:
        """
        Return when the stream has ended and what was put before has left.

        Raises:
            TandemError: How it ended.
        """
        error = self._wait_for_end()
        has_left = threading.Event()
        self.outgoing.close(has_left.set)
        has_left.wait()
        if error is not None:
            raise error

    def _wait_for_end(self) -> TandemError | None:
        try:
            return self._ends.get(timeout=ATTACH_DEADLINE_S)
        except queue.Empty:
            if self.attach_id:
                return self._ends.get()
        return SessionLost(f"no Attach came within {ATTACH_DEADLINE_S:.0f} s of opening the stream")
