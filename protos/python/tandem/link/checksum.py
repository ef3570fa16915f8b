"""
The last field of every message of `Execute`: a CRC-32 of all bytes before it.

Slot state is guarded by a hash that both ends keep, token values by nothing: TCP's own 16-bit sum
misses one damaged segment in 65,536, and proxies and faulty memory come after it. A message whose
sum does not match never happened: its stream is broken, the next one sends it again, and nothing
is computed twice.
"""

from __future__ import annotations

import zlib

from tandem.errors import CorruptMessage

FIELD_NUMBER = 15
"""Of `crc32` in ExecuteRequest and ExecuteResponse; a fixed32, so a tag of one byte comes first."""

_TAG = bytes([FIELD_NUMBER << 3 | 5])
_TRAILER_BYTES = len(_TAG) + 4


def seal(message: bytes) -> bytes:
    """Append the checksum to a serialized message that does not have it."""
    return b"".join((message, _TAG, zlib.crc32(message).to_bytes(4, "little")))


def check_seal(raw: bytes) -> None:
    """
    Check the checksum of a message that came.

    Raises:
        CorruptMessage: It does not match, or there is none.
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
