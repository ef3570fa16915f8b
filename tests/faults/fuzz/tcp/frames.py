"""HTTP/2 frames and header blocks as bytes, right or wrong as the caller says (RFC 9113, 7541)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8

_ANSWERS = frozenset({HEADERS, DATA, RST_STREAM, GOAWAY})


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `length` says another one than the payload has."""

    kind: int
    flags: int = 0
    stream: int = 0
    payload: bytes = b""
    length: int | None = None

    def encode(self) -> bytes:
        """Return the frame's bytes."""
        length = len(self.payload) if self.length is None else self.length
        return (
            length.to_bytes(3, "big")
            + bytes((self.kind, self.flags))
            + self.stream.to_bytes(4, "big")
            + self.payload
        )


def encode(frames: Iterable[Frame]) -> bytes:
    """Return the bytes of frames, one after another."""
    return b"".join(frame.encode() for frame in frames)


def parse(raw: bytes) -> list[Frame]:
    """Return the frames that are whole; what follows the last is left out."""
    found, at = [], 0
    while at + HEAD_BYTES <= len(raw):
        end = at + HEAD_BYTES + int.from_bytes(raw[at : at + 3], "big")
        if end > len(raw):
            break
        stream = int.from_bytes(raw[at + 5 : at + HEAD_BYTES], "big")
        found.append(Frame(raw[at + 3], raw[at + 4], stream, raw[at + HEAD_BYTES : end]))
        at = end
    return found


def is_answered(reply: bytes) -> bool:
    """
    Return whether a server's bytes show that it decoded the preface and went on: it acknowledges
    settings, or answers on a stream. Its own settings prove nothing, as each connection gets them.
    """
    return any(
        frame.kind in _ANSWERS or (frame.kind == SETTINGS and frame.flags & ACK)
        for frame in parse(reply)
    )


def setting(values: Iterable[tuple[int, int]], flags: int = 0) -> Frame:
    """Return a SETTINGS frame."""
    payload = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in values)
    return Frame(SETTINGS, flags, 0, payload)


def number(value: int) -> bytes:
    """Return four bytes: an increment, an error code, a stream."""
    return value.to_bytes(4, "big")


def header_block(headers: Mapping[bytes, bytes]) -> bytes:
    """Return headers as literals without indexing, nothing compressed."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())


def _text(text: bytes) -> bytes:
    return prefixed(len(text), 7) + text


def prefixed(value: int, bits: int, first: int = 0) -> bytes:
    """Return HPACK's form of an integer that begins in the low bits of a byte."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    found, value = bytearray((first | most,)), value - most
    while value >= 0x80:
        found.append(0x80 | value & 0x7F)
        value >>= 7
    found.append(value)
    return bytes(found)


def call_headers(path: bytes) -> dict[bytes, bytes]:
    """Return the headers of a gRPC call."""
    return {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
