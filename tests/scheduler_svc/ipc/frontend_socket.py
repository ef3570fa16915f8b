"""A frontend's socket without an event loop."""

from __future__ import annotations

import contextlib
from pathlib import Path

import zmq

from scheduler_svc.ipc.messages import CoreMessage, FrontendMessage, decode_from_core, encode
from scheduler_svc.ipc.sockets import connect_frontend


class FrontendSocket:
    """A frontend's end for plain blocking code."""

    def __init__(self, path: Path, index: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = connect_frontend(self._context, path, index)

    def send(self, message: FrontendMessage) -> None:
        """Queue one message."""
        self._socket.send(encode(message))

    def receive(self, timeout_s: float) -> CoreMessage | None:
        """Wait for one message; None when the time passed."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        frame: bytes = self._socket.recv()
        return decode_from_core(frame)

    def close(self) -> None:
        """Close at once, as a dying process would."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.close(linger=0)
        self._context.term()
