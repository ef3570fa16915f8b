"""One Execute stream as seen from inside: what is to be sent, and how it ends."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from tandem.errors import SessionLost, TandemError

ATTACH_DEADLINE_S = 10.0
"""A stream that has not attached by then is ended: it would hold a server thread for nothing."""


class StepStream:
    """
    Outgoing side of one stream: any thread puts messages, one server thread takes them.

    Attributes:
        session_epoch: Set when the stream attaches; 0 before.
        attach_id: Likewise.
    """

    def __init__(self) -> None:
        self.session_epoch = 0
        self.attach_id = 0
        self._outgoing: queue.SimpleQueue[bytes | TandemError | None] = queue.SimpleQueue()

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be sent."""
        return self._outgoing.empty()

    def put(self, message: bytes) -> None:
        """Send an encoded message after those before it; dropped once the stream has ended."""
        self._outgoing.put(message)

    def end(self, error: TandemError | None = None) -> None:
        """End the stream after what waits to be sent, with an error or, without one, with OK."""
        self._outgoing.put(error)

    def messages(self) -> Iterator[bytes]:
        """
        What to send, in order, until the stream ends.

        Raises:
            TandemError: How it ended.
        """
        deadline_s: float | None = ATTACH_DEADLINE_S
        while True:
            try:
                item = self._outgoing.get(timeout=deadline_s)
            except queue.Empty:
                raise SessionLost(
                    f"no Attach came within {ATTACH_DEADLINE_S:.0f} s of opening the stream"
                ) from None
            deadline_s = None
            if item is None:
                return
            if isinstance(item, TandemError):
                raise item
            yield item
