"""
The sockets between the core process and its frontends: one zmq ROUTER that the core binds, one
DEALER per frontend.

Messages are single frames. Both directions have a bounded pipe. The core never waits for a full one
(`try_send` returns False, and the loop merges updates); a frontend does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from scheduler_svc.ipc.messages import (
    CoreMessage,
    FrontendMessage,
    decode_from_frontend,
    encode,
)
from tandem.network.listen_address import MAX_UNIX_PATH_BYTES

PIPE_MESSAGES = 64
"""
Messages a pipe holds before it counts as full: about as many steps as a frontend may lag behind.
"""


# Numbers, as members of enums are far slower to combine and to look up, some times in each step.
_FIRST_OF_TWO = int(zmq.NOBLOCK | zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


class FrontendGone(Exception):
    """No frontend with this index is connected any more."""


class AsyncSocket(Protocol):
    """Part of `zmq.asyncio.Socket` that a frontend uses."""

    def send(self, data: bytes) -> asyncio.Future[object]:
        """Queue one message in order; the future is done when the message is in the pipe."""

    async def recv(self, flags: int = 0) -> bytes:
        """Wait for one message; with NOBLOCK raise zmq.Again if there is none."""

    def close(self) -> None:
        """Close without waiting."""


def frontend_identity(index: int) -> bytes:
    """Return the routing id of a frontend's socket, by which the core tells frontends apart."""
    return b"frontend-%d" % index


def _index_of(identity: bytes) -> int | None:
    prefix, _, number = identity.partition(b"-")
    return int(number) if prefix == b"frontend" and number.isdigit() else None


class CoreSocket:
    """The core's end. Not thread-safe: it belongs to the thread that runs the core's loop."""

    def __init__(self, path: Path) -> None:
        """
        Bind at `path`, in a directory that only this user may enter (0700); the socket file is
        0600.

        Raises:
            ValueError: The path is too long for a unix socket.
        """
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"{path} is too long for a unix socket: choose a shorter TMPDIR")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.SNDHWM, PIPE_MESSAGES)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.bind(f"ipc://{path}")
        path.chmod(0o600)

    def fileno(self) -> int:
        """
        Return a file descriptor for a poller.

        It is readable while the socket has an event that no call on this socket has processed. Any
        call, from any thread, processes events, so ask `has_messages` after all other calls.
        """
        return int(self._socket.get(zmq.FD))

    @property
    def has_messages(self) -> bool:
        """True when `receive` would yield a message now."""
        return bool(int(self._socket.get(_EVENTS)) & _READABLE)

    def receive(self, at_most: int) -> Iterator[tuple[int, FrontendMessage]]:
        """
        Yield up to `at_most` messages that have already arrived, with the indices of their senders.

        Raises:
            msgspec.DecodeError: A frame is not a FrontendMessage; the frame is consumed.
        """
        for _ in range(at_most):
            try:
                identity, frame = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            index = _index_of(identity)
            if index is None:
                raise msgspec.ValidationError(f"message from unknown peer {identity!r}")
            yield index, decode_from_frontend(frame)

    def try_send(self, index: int, message: CoreMessage) -> bool:
        """
        Send without waiting; return False, with nothing sent, when the frontend's pipe is full.

        Raises:
            FrontendGone: It is not connected.
        """
        frame = encode(message)  # first: what cannot be encoded must leave no half of a message
        try:
            # A full pipe, or an unknown frontend, refuses the first frame: then none is sent.
            self._socket.send(frontend_identity(index), _FIRST_OF_TWO)
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise FrontendGone from error
        return True

    def close(self) -> None:
        """Close, after waiting up to a second for sent messages to leave."""
        self._socket.close()
        self._context.term()


def connect_frontend(context: zmq.Context[Any], path: Path, index: int) -> Any:
    """
    Open a frontend's end; the kind of socket (plain or asyncio) is that of `context`.

    The caller sends `encode(Hello(...))` first, and decodes messages with `decode_from_core`.
    """
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, frontend_identity(index))
    socket.set(zmq.RCVHWM, PIPE_MESSAGES)
    socket.set(zmq.SNDHWM, 1024)
    socket.set(zmq.LINGER, 0)
    socket.connect(f"ipc://{path}")
    return socket
