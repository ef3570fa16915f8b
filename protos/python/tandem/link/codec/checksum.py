"""
Checksum in the last field of every message of `Execute`: a CRC-32 of all bytes before it.

Slot state is guarded by a hash that both ends keep, but token values have no other guard: TCP's own
16-bit sum misses one damaged segment in 65,536, and does not cover proxies and faulty memory. A
message with a wrong checksum counts as not received: its stream is broken, the message is sent
again on the next one, and no step is computed twice.
"""

from __future__ import annotations

import zlib

from tandem.errors import CorruptMessage

FIELD_NUMBER = 15
"""Field number of `crc32` in ExecuteRequest and ExecuteResponse: a fixed32 after a one-byte tag."""

_TAG = bytes([FIELD_NUMBER << 3 | 5])
_TRAILER_BYTES = len(_TAG) + 4


def seal(message: bytes) -> bytes:
    """Return a serialized message with its checksum appended."""
    return b"".join((message, _TAG, zlib.crc32(message).to_bytes(4, "little")))


def check_seal(raw: bytes) -> None:
    """
    Check the checksum of a received message.

    Raises:
        CorruptMessage: The checksum does not match, or there is none.
    """
    end = len(raw) - _TRAILER_BYTES
    if end < 0 or raw[end : end + 1] != _TAG:
        raise CorruptMessage(
            f"a message of {len(raw)} bytes on the step link has no checksum at its end: it was "
            "cut or changed on the way"
        )
    found, expected = zlib.crc32(memoryview(raw)[:end]), int.from_bytes(raw[-4:], "little")
    if found != expected:
        raise CorruptMessage(
            f"a message of {len(raw)} bytes on the step link was changed on the way: its checksum "
            f"is {expected:#010x}, its bytes give {found:#010x}"
        )
