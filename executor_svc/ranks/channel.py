"""
The ordered stream of frames between rank 0 and one other rank, over a connected socket.

Collectives carry no steps: ranks that are idle would run into their time-outs, and the sizes of
steps vary.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import threading
from dataclasses import dataclass

from tandem.errors import InternalError
from tandem.link.codec.wire import MAX_MESSAGE_BYTES

_HEADER = struct.Struct("<BQI")
"""Kind, sequence number, length of the payload."""
HEADER_BYTES = _HEADER.size
_READ_BYTES = 1 << 18


class Kind(enum.IntEnum):
    """
    Kinds of frames. From rank 0: STEP to SHUTDOWN; to rank 0: HELLO, DONE and FAILED; either way:
    READY and BEAT.
    """

    HELLO = 1
    """First frame of a rank: the token that rank 0 gave out, and its number as sequence number."""
    READY = 2
    """The sender is loaded and warm: from now on its silence counts."""
    BEAT = 3
    """A sign of life."""
    STEP = 4
    """A step, as the bytes in which the scheduler sent it."""
    RESET = 5
    """All slots are forgotten, for a new session."""
    LOST = 6
    """The last step contradicted rank 0's slots, so that it must have contradicted all slots."""
    CHECK = 7
    """Checksum of rank 0's device state after the frames before, 8 bytes."""
    SHUTDOWN = 8
    """The executor ends in good order."""
    DONE = 9
    """The frame of this sequence number, a RESET or an errand, is done."""
    FAILED = 10
    """The sender cannot go on: reason and message, with a zero byte between them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `seq` counts the frames of rank 0 from 1, and is 0 in those that have no place."""

    kind: Kind
    seq: int = 0
    payload: bytes = b""


class ChannelClosed(Exception):
    """The other end's process or its side of the connection has ended."""


class FrameReader:
    """Frames put together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def feed(self, piece: bytes) -> list[Frame]:
        """
        Take the next bytes and return the frames that they complete, in order.

        Raises:
            InternalError: These bytes are no frames.
        """
        self._pieces += piece
        frames, start = [], 0
        while len(self._pieces) - start >= _HEADER.size:
            kind, seq, length = _HEADER.unpack_from(self._pieces, start)
            if kind not in Kind.__members__.values() or length > MAX_MESSAGE_BYTES:
                raise InternalError(f"a rank sent a frame of kind {kind} and {length} bytes")
            end = start + _HEADER.size + length
            if len(self._pieces) < end:
                break
            payload = bytes(memoryview(self._pieces)[start + _HEADER.size : end])
            frames.append(Frame(Kind(kind), seq, payload))
            start = end
        del self._pieces[:start]
        return frames


class Channel:
    """
    One end of a connection. Any thread may send; one thread receives.

    Attributes:
        rank: Rank at the other end.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._socket = connection
        self._sending = threading.Lock()
        self._reader = FrameReader()

    def fileno(self) -> int:
        """Return the descriptor, to wait for received bytes."""
        return self._socket.fileno()

    def send(self, frame: Frame) -> None:
        """
        Send a frame after those before it; waits while the other end is slow to read.

        Raises:
            ChannelClosed: The other end is gone.
        """
        with self._sending:
            self._send(frame)

    def beat(self) -> None:
        """
        Send a sign of life, unless another frame is on its way, which is one.

        Raises:
            ChannelClosed: The other end is gone.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            # A writable socket has room for a frame this short: a silent peer holds up no beat.
            if select.select([], [self._socket], [], 0)[1]:
                self._send(Frame(Kind.BEAT))
        finally:
            self._sending.release()

    def say_last(self, frame: Frame) -> None:
        """Send a frame without payload if the other end is there and reads; wait for neither."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            if select.select([], [self._socket], [], 0)[1]:
                self._send(frame)
        except ChannelClosed:
            return
        finally:
            self._sending.release()

    def receive(self) -> list[Frame]:
        """
        Wait for bytes and return the frames that they complete, which may be none.

        Raises:
            ChannelClosed: The other end is gone.
            InternalError: It sent something else than frames.
        """
        try:
            piece = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not piece:
            raise ChannelClosed("end of stream")
        return self._reader.feed(piece)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _send(self, frame: Frame) -> None:
        payload = frame.payload
        header = _HEADER.pack(frame.kind, frame.seq, len(payload))
        try:
            self._socket.sendall(header + payload)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
