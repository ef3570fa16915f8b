"""Parts of a serialized protobuf message, for encoders that write their bytes directly."""

from __future__ import annotations

from google.protobuf.message import Message

VARINT, FIXED64, LENGTH_DELIMITED = 0, 1, 2
"""Wire types of fields."""


def _groups(number: int) -> bytes:
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


_SHORT = [_groups(number) for number in range(1 << 14)]
"""Varints of up to two bytes: nearly all lengths, ids and offsets."""


def varint(number: int) -> bytes:
    """Return a number below 2^64 as protobuf writes it: seven bits per byte, lowest first."""
    return _SHORT[number] if number < 1 << 14 else _groups(number)


def tag(message: type[Message], field: str, wire_type: int) -> bytes:
    """Return what stands before the value of a message's field."""
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)
