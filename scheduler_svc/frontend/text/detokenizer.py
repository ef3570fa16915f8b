"""
Token ids to text, one token at a time, with the same text as decoding all of them at once.

Text that is not yet certain (half a code point, a run of byte tokens) is kept until it is; nothing
is decoded twice, so a token costs O(its own text).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

REPLACEMENT = "\ufffd"


class Decoded(NamedTuple):
    """
    What one more token made certain.

    Attributes:
        head: Rest of the text of the tokens before it, where it was still open and has become
            certain without using this token's bytes; else None.
        text: Text that follows.
        clean: True when all text of all tokens so far is certain.
    """

    head: str | None
    text: str
    clean: bool


class BytePiece(NamedTuple):
    """
    A token's bytes, and what they decode to where they are whole code points: most are, and then
    need no decoding again.
    """

    raw: bytes
    whole: Decoded | None

    @classmethod
    def of(cls, raw: bytes) -> BytePiece:
        """Decode once."""
        try:
            return cls(raw, Decoded(None, raw.decode(), True))
        except UnicodeDecodeError:
            return cls(raw, None)


class Detokenizer(Protocol):
    """Turns one output into text; stateful."""

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """
        Text of the next tokens if all text is certain before and after them, else None. They are
        not taken, and need not be: plain text leaves nothing to remember. This is the usual case,
        and much cheaper than one token at a time.
        """

    def flush(self) -> str:
        """End: the text of everything still open, with U+FFFD for what never became valid."""


class NoText:
    """For models without a tokenizer: no token has text."""

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""
        del token_id
        return Decoded(None, "", True)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """No token has text."""
        del token_ids
        return ""

    def flush(self) -> str:
        """Nothing is ever open."""
        return ""


class ByteDetokenizer:
    """
    For byte-level vocabularies: tokens are bytes, text is their UTF-8 decoding, where every maximal
    invalid part becomes one U+FFFD.
    """

    def __init__(self, pieces: Mapping[int, BytePiece]) -> None:
        self._pieces = pieces
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = decoder.decode
        self._state = decoder.getstate
        self._open = False

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""
        piece = self._pieces[token_id]
        if self._open:
            return self._push_open(piece.raw)
        if piece.whole is not None:
            return piece.whole
        text = self._decode(piece.raw)
        self._open = self._is_open()
        return Decoded(None, text, not self._open)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Text of the next tokens if they begin and end between code points and are valid."""
        if self._open:
            return None
        pieces = self._pieces
        try:
            return b"".join([pieces[token_id].raw for token_id in token_ids]).decode()
        except UnicodeDecodeError:
            return None

    def _push_open(self, piece: bytes) -> Decoded:
        # Byte by byte until the open code point is complete or known to be invalid: at most three.
        for at in range(len(piece)):
            text = self._decode(piece[at : at + 1])
            if not text:
                continue
            broken_before = at == 0 and text[0] == REPLACEMENT and not self._completed(text)
            rest = self._decode(piece[at + 1 :])
            self._open = self._is_open()
            if broken_before:
                return Decoded(text[0], text[1:] + rest, not self._open)
            return Decoded(None, text + rest, not self._open)
        return Decoded(None, "", False)

    def _completed(self, text: str) -> bool:
        """Whether U+FFFD is a real one that was just completed, not the mark of invalid bytes."""
        return len(text) == 1 and not self._is_open()

    def _is_open(self) -> bool:
        return bool(self._state()[0])

    def flush(self) -> str:
        """End: one U+FFFD for an incomplete code point."""
        self._open = False
        return self._decode(b"", True)


class PieceDetokenizer:
    """
    For sentencepiece-like vocabularies: tokens are text, except byte tokens, which mean something
    only as a whole run: valid UTF-8, or one U+FFFD for each byte.
    """

    def __init__(self, pieces: Mapping[int, str | int], *, strip_spaces: int) -> None:
        """
        Start one output.

        Args:
            pieces: A token's text, or the value of its byte.
            strip_spaces: Leading spaces to drop, where the output begins the sequence.
        """
        self._pieces = pieces
        self._strip_spaces = strip_spaces
        self._run = bytearray()

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            self._run.append(piece)
            return Decoded(None, "", False)
        if not piece:
            return Decoded(None, "", not self._run)
        head = self.flush() if self._run else None
        return Decoded(head, self._strip(piece), True)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Text of the next tokens if no run of byte tokens is open and none of them is one."""
        if self._run or self._strip_spaces:
            return None
        pieces = self._pieces
        texts = [pieces[token_id] for token_id in token_ids]
        if int in map(type, texts):
            return None
        return "".join(cast("list[str]", texts))

    def flush(self) -> str:
        """End: the text of an open run of byte tokens."""
        run, self._run = self._run, bytearray()
        try:
            return self._strip(run.decode())
        except UnicodeDecodeError:
            return self._strip(REPLACEMENT * len(run))

    def _strip(self, text: str) -> str:
        if self._strip_spaces and text:
            stripped = text.lstrip(" ")
            num_dropped = min(self._strip_spaces, len(text) - len(stripped))
            self._strip_spaces -= num_dropped
            if num_dropped < len(text):
                self._strip_spaces = 0
            return text[num_dropped:]
        return text


class MetaspaceDetokenizer:
    """For Metaspace decoders: tokens are text; the sequence's first one loses its spaces."""

    def __init__(self, pieces: Mapping[int, str], *, drop_first_space: bool) -> None:
        self._pieces = pieces
        self._drop_space = drop_first_space

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""
        piece = self._pieces[token_id]
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.replace(" ", "")
        return Decoded(None, piece, True)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Text of the next tokens, unless the first one with text is still to come."""
        if self._drop_space:
            return None
        pieces = self._pieces
        return "".join([pieces[token_id] for token_id in token_ids])

    def flush(self) -> str:
        """Nothing is ever open."""
        return ""


class WordDetokenizer:
    """For decoders that write the sequence's first token otherwise than all that follow it."""

    def __init__(
        self, first: Mapping[int, str], following: Mapping[int, str], *, is_first: bool
    ) -> None:
        """
        Start one output.

        Args:
            first: Text of a token that begins the sequence; empty where it does not count.
            following: Text of any other.
            is_first: The output begins the sequence.
        """
        self._first = first
        self._following = following
        self._is_first = is_first

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""
        if not self._is_first:
            return Decoded(None, self._following[token_id], True)
        piece = self._first[token_id]
        self._is_first = not piece
        return Decoded(None, piece, True)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Text of the next tokens, unless the first one with text is still to come."""
        if self._is_first:
            return None
        pieces = self._following
        return "".join([pieces[token_id] for token_id in token_ids])

    def flush(self) -> str:
        """Nothing is ever open."""
        return ""


def decode_all(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    """Text of a whole output."""
    parts = []
    for token_id in token_ids:
        decoded = detokenizer.push(token_id)
        parts += [decoded.head or "", decoded.text]
    return "".join((*parts, detokenizer.flush()))
