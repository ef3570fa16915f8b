"""One Execute stream inside the server: its outgoing messages and its end."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from tandem.errors import SessionLost, TandemError
from tandem.network.outgoing import OutgoingMessages

ATTACH_DEADLINE_S = 10.0
"""Seconds within which a stream must attach; else it is ended, as it holds a server thread."""

MAX_UNATTACHED = 4
"""Most streams that may wait for their Attach, which a scheduler sends at once."""


class StepStream:
    """
    A stream that any thread may put messages into or end; one server thread waits for its end.

    Attributes:
        outgoing: Queue that sends the messages.
        session_epoch: Epoch of its session, set when the stream attaches; 0 before.
        attach_id: Number of its attachment, set when the stream attaches; 0 before.
    """

    def __init__(self, begin: Callable[[bytes], None]) -> None:
        """
        Args:
            begin: Begins to send an encoded message; `outgoing.left` is called once it was sent.
        """
        self.session_epoch = 0
        self.attach_id = 0
        self.outgoing = OutgoingMessages(begin)
        self._ends: queue.SimpleQueue[TandemError | None] = queue.SimpleQueue()

    @property
    def is_idle(self) -> bool:
        """True if no message is being sent or waits to be sent."""
        return self.outgoing.is_empty

    def put(self, message: bytes) -> None:
        """Send an encoded message after those before it; drop it once the stream has ended."""
        self.outgoing.put(message)

    def end(self, error: TandemError | None = None) -> None:
        """End the stream after the waiting messages, with an error or, without one, with OK."""
        self._ends.put(error)

    def wait(self) -> None:
        """
        Wait until the stream has ended and the messages put before have been sent.

        Raises:
            TandemError: The stream ended with this error.
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


class UnattachedStreams:
    """
    Streams that have not attached yet, at most `MAX_UNATTACHED`, so that they never take all the
    threads of the step link. Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: deque[StepStream] = deque()

    def add(self, stream: StepStream) -> None:
        """Add a new stream, and end the oldest one if there are too many."""
        with self._lock:
            self._streams.append(stream)
            oldest = self._streams.popleft() if len(self._streams) > MAX_UNATTACHED else None
        if oldest is not None:
            oldest.end(SessionLost(f"{MAX_UNATTACHED} newer streams wait for their Attach"))

    def discard(self, stream: StepStream) -> None:
        """Forget a stream that attaches or has ended."""
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)
