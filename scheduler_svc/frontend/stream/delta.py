"""
Deltas of new output. Most messages of a busy frontend are deltas, so their bytes are written
directly: building the message first costs twice as much.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import NamedTuple

from scheduler_svc.frontend.text.output import OutputChunk, TokenBytes
from tandem.inference.v1.inference_service_pb2 import GenerateResponse
from tandem.inference.v1.stream_pb2 import Delta, TokenLogprobs
from tandem.link.codec.varint import LENGTH_DELIMITED, VARINT, tag, varint
from tandem.link.logprobs import TokenLogprob

_DELTA = tag(GenerateResponse, "delta", LENGTH_DELIMITED)
_CHOICE = tag(Delta, "choice", VARINT)
_OFFSET = tag(Delta, "first_token_offset", VARINT)
_IDS = tag(Delta, "token_ids", LENGTH_DELIMITED)
_TEXT = tag(Delta, "text", LENGTH_DELIMITED)
_NO_BYTES = TokenBytes(b"", [])


def _no_text(_token_id: int) -> str:
    return ""


class OutputDelta(NamedTuple):
    """
    New output of one choice; `text_of` returns the text of a token by itself, for logprobs. The
    client may have asked for a response `with_text` or `with_ids` only. The last `num_requested` of
    the ids that logprobs come with are those that the client named.
    """

    choice: int
    chunk: OutputChunk
    text_of: Callable[[int], str] = _no_text
    with_text: bool = True
    with_ids: bool = True
    num_requested: int = 0

    def encode(self) -> bytes:
        """Return a serialized GenerateResponse."""
        choice, chunk, _, with_text, with_ids, _ = self
        ids = array("i", chunk.token_ids).tobytes() if with_ids else b""
        text = chunk.text.encode() if with_text else b""
        delta = b"".join(
            (
                _CHOICE + varint(choice) if choice else b"",
                _OFFSET + varint(chunk.first_token_offset) if chunk.first_token_offset else b"",
                _IDS + varint(len(ids)) if ids else b"",
                ids,
                _TEXT + varint(len(text)) if text else b"",
                text,
                # A serialized message may be joined from parts.
                Delta(logprobs=logprobs_of(self)).SerializeToString() if chunk.logprobs else b"",
            )
        )
        return b"".join((_DELTA, varint(len(delta)), delta))


def logprobs_of(delta: OutputDelta) -> list[TokenLogprobs]:
    """Return the logprobs of each token; empty if the request did not ask for them."""
    chunk, text_of = delta.chunk, delta.text_of
    raws: Iterable[TokenBytes] = chunk.token_bytes or repeat(_NO_BYTES)
    # There are as many logprobs, and bytes, as tokens, or none.
    entries = zip(chunk.token_ids, chunk.logprobs, raws, strict=False)
    return [_told(delta, text_of, *entry) for entry in entries]


def _told(
    delta: OutputDelta,
    text_of: Callable[[int], str],
    token_id: int,
    told: TokenLogprob,
    raw: TokenBytes,
) -> TokenLogprobs:
    num_top = len(told.top_token_ids) - delta.num_requested
    top_token_ids = told.top_token_ids[:num_top]
    return TokenLogprobs(
        logprob=told.logprob,
        top_token_ids=top_token_ids,
        top_logprobs=told.top_logprobs[:num_top],
        text=text_of(token_id),
        top_texts=[text_of(one) for one in top_token_ids],
        token_bytes=raw.chosen,
        top_token_bytes=raw.top[:num_top],
        requested_logprobs=told.top_logprobs[num_top:],
    )


def encode_response(message: GenerateResponse | OutputDelta) -> bytes:
    """Return the bytes of a message to the client."""
    return message.encode() if isinstance(message, OutputDelta) else message.SerializeToString()
