"""
Bounds on the number of fields of an encoded message, checked before it is decoded.

An empty string of a repeated field takes two bytes on the wire and sixteen or more in memory, an
empty message ten times as many. So the fields of a large message are counted first, without making
anything of them; a request with more than its checks would accept never takes the memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from scheduler_svc.frontend.request.chat import MAX_CHAT_MESSAGES, MAX_TOOLS
from scheduler_svc.frontend.request.sampling import MAX_BIASED_IDS
from scheduler_svc.frontend.request.validation import (
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from tandem.errors import InvalidParameter

MAX_FIELDS = 1 << 15
"""Most fields of one message, those of the messages in it included."""
MAX_SINGULAR = 64
"""Most fields of one message beside those that repeat; a field may be there more than once."""
MAX_REPEATED: Mapping[str, int] = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_BIASED_IDS,
    "messages": MAX_CHAT_MESSAGES,
    "tools": MAX_TOOLS,
    "choices": MAX_CHOICES,
}
"""Most occurrences of a repeated field by its name. Numbers are packed: one occurrence for all."""
MAX_UNPACKED = 1 << 14
"""Most occurrences of any other repeated field, such as ids that are not packed."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_NUM_BYTES = {_FIXED64: 8, _FIXED32: 4}


def check_bounds(raw: bytes, message: Descriptor) -> None:
    """
    Check that an encoded message has no more fields than a request can have. What is no message at
    all passes: the decoder refuses it.

    Raises:
        InvalidParameter: A field, whose path the error has, is there too often.
    """
    _Count(raw).check(message, 0, len(raw), "")


class _Malformed(Exception):
    """The bytes are no message; never leaves this module."""


class _Count:
    """Number of fields seen in one message, over all its depths."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._num_fields = 0

    def check(self, message: Descriptor, begin: int, end: int, path: str) -> None:
        """Check the message that lies from `begin` to `end`, and those in it."""
        counts: dict[int, int] = {}
        at = begin
        try:
            while at < end:
                tag, at = self._varint(at, end)
                number, wire_type = tag >> 3, tag & 7
                length = _NUM_BYTES.get(wire_type, 0)
                if wire_type in (_VARINT, _LENGTH):
                    value, at = self._varint(at, end)
                    length = value if wire_type == _LENGTH else 0
                elif wire_type not in _NUM_BYTES:
                    return
                if at + length > end:
                    return
                field = message.fields_by_number.get(number)
                is_repeated = field is not None and field.is_repeated
                key = number if is_repeated else 0
                counts[key] = counts.get(key, 0) + 1
                self._count(field if is_repeated else None, counts[key], path)
                if field is not None and wire_type == _LENGTH and field.message_type is not None:
                    self.check(field.message_type, at, at + length, f"{path}{field.name}.")
                at += length
        except _Malformed:
            return

    def _count(self, repeated: FieldDescriptor | None, times: int, path: str) -> None:
        self._num_fields += 1
        name = "" if repeated is None else repeated.name
        most = MAX_SINGULAR if repeated is None else MAX_REPEATED.get(name, MAX_UNPACKED)
        if times > most:
            what = "the fields that do not repeat" if repeated is None else name
            raise InvalidParameter(
                f"{what} may be there at most {most} times in one message.",
                field=f"{path}{name}".removesuffix("."),
            )
        if self._num_fields > MAX_FIELDS:
            raise InvalidParameter(
                f"a message may have at most {MAX_FIELDS} fields, those of the messages in it "
                "included.",
                field=f"{path}{name}".removesuffix("."),
            )

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        raw = self._raw
        while at < end and shift < 64:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise _Malformed
