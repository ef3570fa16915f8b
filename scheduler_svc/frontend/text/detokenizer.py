"""
Incremental detokenization, with the same text as decoding all tokens at once.

Text that is not yet certain (half a code point, a run of byte tokens) is held until it is. No text
is decoded twice, so a token costs time proportional to its own text.

`tokenizers.DecodeStream` is not used: it has no end, so text that is still open after the last
token is lost, and it returns the text of several tokens as one, so that offsets and stop strings
could not tell which token a text belongs to (`Decoded.head`).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

REPLACEMENT = "\ufffd"


class Decoded(NamedTuple):
    """
    Text that one more token made certain.

    Attributes:
        head: Rest of the text of the tokens before it, if it was open and has become certain
            without this token's bytes; else None.
        text: Text that follows `head`.
        clean: True when all text of all tokens so far is certain.
    """

    head: str | None
    text: str
    clean: bool


class BytePiece(NamedTuple):
    """
    Bytes of a token, with their text if they are whole code points, as most are; it is then decoded
    only once.
    """

    raw: bytes
    whole: Decoded | None

    @classmethod
    def of(cls, raw: bytes) -> BytePiece:
        """Make the piece of these bytes."""
        try:
            return cls(raw, Decoded(None, raw.decode(), True))
        except UnicodeDecodeError:
            return cls(raw, None)


class Detokenizer(Protocol):
    """Detokenizer of one output; stateful."""

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """
        Return the text of the next tokens if all text is certain before and after them, else None.

        The tokens need not be pushed then: such text leaves no state. This is the usual case, and
        much cheaper than one token at a time.
        """

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add to the output if it were the next one."""

    def flush(self) -> str:
        """End the output and return the text that is still open, with U+FFFD for invalid bytes."""


class NoText:
    """Detokenizer of models without a tokenizer, in which no token has text."""

    def push(self, token_id: int) -> Decoded:
        """Take the next token."""
        del token_id
        return Decoded(None, "", True)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Return an empty text."""
        del token_ids
        return ""

    def bytes_of(self, token_id: int) -> bytes:
        """Return no bytes."""
        del token_id
        return b""

    def flush(self) -> str:
        """Return an empty text, as no text is ever open."""
        return ""


class ByteDetokenizer:
    """
    Detokenizer of byte-level vocabularies: tokens are bytes, and the text is their UTF-8 decoding,
    in which every maximal invalid part becomes one U+FFFD.
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
        """Return the text of the next tokens if they are whole valid code points, else None."""
        if self._open:
            return None
        pieces = self._pieces
        try:
            return b"".join([pieces[token_id].raw for token_id in token_ids]).decode()
        except UnicodeDecodeError:
            return None

    def _push_open(self, piece: bytes) -> Decoded:
        # At most three bytes, one by one, make the open code point complete or invalid.
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
        """Return True if U+FFFD is a real code point just completed, not the mark of bad bytes."""
        return len(text) == 1 and not self._is_open()

    def _is_open(self) -> bool:
        return bool(self._state()[0])

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add to the output if it were the next one."""
        return self._pieces[token_id].raw

    def flush(self) -> str:
        """End the output and return one U+FFFD if a code point is incomplete."""
        self._open = False
        return self._decode(b"", True)


class PieceDetokenizer:
    """
    Detokenizer of sentencepiece-like vocabularies: tokens are text, except byte tokens, of which
    only a whole run has text: valid UTF-8, or one U+FFFD for each byte.
    """

    def __init__(self, pieces: Mapping[int, str | int], *, strip_spaces: int) -> None:
        """
        Start one output.

        Args:
            pieces: Text of each token, or the value of its byte.
            strip_spaces: Number of leading spaces to drop, if the output begins the sequence.
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
        """Return the text of the next tokens if there are no byte tokens or spaces to strip."""
        if self._run or self._strip_spaces:
            return None
        pieces = self._pieces
        texts = [pieces[token_id] for token_id in token_ids]
        if int in map(type, texts):
            return None
        return "".join(cast("list[str]", texts))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add to the output if it were the next one."""
        piece = self._pieces[token_id]
        raw = bytes((piece,)) if isinstance(piece, int) else piece.encode()
        # Byte tokens that are open may be spaces that will be dropped first.
        left = 0 if self._run.strip(b" ") else max(0, self._strip_spaces - len(self._run))
        return raw[min(left, len(raw) - len(raw.lstrip(b" "))) :]

    def flush(self) -> str:
        """End the output and return the text of an open run of byte tokens."""
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
    """Detokenizer for Metaspace decoders: tokens are text; a sequence's first loses its spaces."""

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
        """Return the text of the next tokens, or None before the first token with text."""
        if self._drop_space:
            return None
        pieces = self._pieces
        return "".join([pieces[token_id] for token_id in token_ids])

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add to the output if it were the next one."""
        piece = self._pieces[token_id]
        return (piece.replace(" ", "") if self._drop_space else piece).encode()

    def flush(self) -> str:
        """Return an empty text, as no text is ever open."""
        return ""


class WordDetokenizer:
    """Detokenizer for decoders that write a sequence's first token differently from the others."""

    def __init__(
        self, first: Mapping[int, str], following: Mapping[int, str], *, is_first: bool
    ) -> None:
        """
        Start one output.

        Args:
            first: Text of each token as the first of the sequence; empty if it does not count.
            following: Text of each token after another one.
            is_first: True if the output begins the sequence.
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
        """Return the text of the next tokens, or None before the first token with text."""
        if self._is_first:
            return None
        pieces = self._following
        return "".join([pieces[token_id] for token_id in token_ids])

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add to the output if it were the next one."""
        pieces = self._first if self._is_first else self._following
        return pieces[token_id].encode()

    def flush(self) -> str:
        """Return an empty text, as no text is ever open."""
        return ""


def decode_all(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a whole output."""
    parts = []
    for token_id in token_ids:
        decoded = detokenizer.push(token_id)
        parts += [decoded.head or "", decoded.text]
    return "".join((*parts, detokenizer.flush()))
