"""
Deltas of new output. Most messages of a busy frontend are deltas, so their bytes are written
directly: building the message first costs twice as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from scheduler_svc.frontend.text.output import OutputChunk
from tandem.inference.v1.inference_service_pb2 import GenerateResponse
from tandem.inference.v1.stream_pb2 import Delta, TokenLogprobs

_VARINT_BITS = 7
_BYTES = 2
"""Wire type of fields with a length."""


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 1 << _VARINT_BITS:
        parts.append(number & 0x7F | 0x80)
        number >>= _VARINT_BITS
    parts.append(number)
    return bytes(parts)


def _tag(message: type, field: str, wire_type: int = _BYTES) -> bytes:
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)  # type: ignore[attr-defined]  # every message has one


_DELTA = _tag(GenerateResponse, "delta")
_CHOICE = _tag(Delta, "choice", 0)
_OFFSET = _tag(Delta, "first_token_offset", 0)
_IDS = _tag(Delta, "token_ids")
_TEXT = _tag(Delta, "text")
_SHORT = [_varint(number) for number in range(1 << 2 * _VARINT_BITS)]
"""Varints of up to two bytes."""


def _no_text(_token_id: int) -> str:
    return ""


class OutputDelta(NamedTuple):
    """New output of one choice; `text_of` returns the text of a token by itself, for logprobs."""

    choice: int
    chunk: OutputChunk
    text_of: Callable[[int], str] = _no_text

    def encode(self) -> bytes:
        """Return a serialized GenerateResponse."""
        choice, chunk, _ = self
        ids, text = array("i", chunk.token_ids).tobytes(), chunk.text.encode()
        delta = b"".join(
            (
                _CHOICE + _number(choice) if choice else b"",
                _OFFSET + _number(chunk.first_token_offset) if chunk.first_token_offset else b"",
                _IDS + _number(len(ids)) if ids else b"",
                ids,
                _TEXT + _number(len(text)) if text else b"",
                text,
                # A serialized message may be joined from parts.
                Delta(logprobs=logprobs_of(self)).SerializeToString() if chunk.logprobs else b"",
            )
        )
        return b"".join((_DELTA, _number(len(delta)), delta))


def logprobs_of(delta: OutputDelta) -> list[TokenLogprobs]:
    """Return the logprobs of each token; empty if the request did not ask for them."""
    _, chunk, text_of = delta
    return [
        TokenLogprobs(
            logprob=logprob,
            top_token_ids=top_token_ids,
            top_logprobs=top_logprobs,
            text=text_of(token_id),
            top_texts=[text_of(one) for one in top_token_ids],
        )
        # There are as many logprobs as tokens, or none.
        for token_id, (logprob, top_token_ids, top_logprobs) in zip(
            chunk.token_ids, chunk.logprobs, strict=False
        )
    ]


def _number(value: int) -> bytes:
    return _SHORT[value] if value < len(_SHORT) else _varint(value)


def encode_response(message: GenerateResponse | OutputDelta) -> bytes:
    """Return the bytes of a message to the client."""
    return message.encode() if isinstance(message, OutputDelta) else message.SerializeToString()
