"""Random protobuf messages, drawn from their descriptors, and random changes of encoded ones."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "user",
    "the quick brown fox",
    "{}",
    '{"a": [1, 2.5, null]}',
    "{",
    "\x00",
    "\u2028",
    "é😀",
    "<|im_end|>",
    "x" * 300,
    "{{ 1 / 0 }}",
    "tandem-py",
)
MAX_DEPTH = 5
NOISE = 0.1
"""Share of numbers that are drawn from their whole range instead of near zero."""


def fill(message: Message, draw: random.Random, *, share: float = 0.3, depth: int = 0) -> None:
    """Set each field of a message with a probability, to a random value."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() > share:
            continue
        if field.message_type is not None and depth >= MAX_DEPTH:
            continue
        _set(message, field, draw, share, depth)


def _set(
    message: Message, field: FieldDescriptor, draw: random.Random, share: float, depth: int
) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(draw.randrange(3)):
            getattr(message, field.name)[_scalar(key, draw)] = _scalar(value, draw)
    elif field.is_repeated:
        for _ in range(draw.randrange(4)):
            if field.message_type is None:
                getattr(message, field.name).append(_scalar(field, draw))
            else:
                fill(getattr(message, field.name).add(), draw, share=share, depth=depth + 1)
    elif field.message_type is None:
        setattr(message, field.name, _scalar(field, draw))
    else:
        getattr(message, field.name).SetInParent()
        fill(getattr(message, field.name), draw, share=share, depth=depth + 1)


def _scalar(field: FieldDescriptor, draw: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        if draw.random() < NOISE:
            return draw.choice((low, high, draw.randint(low, high)))
        return max(low, draw.randrange(-1, 40))
    choices: tuple[Any, ...] = _TEXTS
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        choices = _FLOATS
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        choices = (False, True)
    elif kind == FieldDescriptor.CPPTYPE_ENUM:
        choices = (*(value.number for value in field.enum_type.values), 99)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        choices = (draw.randbytes(draw.randrange(32)),)
    return draw.choice(choices)


def changed(raw: bytes, draw: random.Random) -> bytes:
    """Return an encoded message with some of its bytes flipped, cut out or repeated."""
    found = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 3))):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0 if found:
                found[at % len(found)] ^= 1 << draw.randrange(8)
            case 1:
                del found[at : at + draw.randrange(1, 8)]
            case 2:
                found[at:at] = draw.randbytes(draw.randrange(1, 8))
            case _:
                found[at:at] = found[at : at + draw.randrange(1, 32)]
    return bytes(found)
