"""Texts of the tokens of a Hugging Face tokenizer, and the choice of its detokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer

from scheduler_svc.frontend.text.detokenizer import (
    ByteDetokenizer,
    BytePiece,
    Detokenizer,
    MetaspaceDetokenizer,
    PieceDetokenizer,
    WordDetokenizer,
)
from tandem.errors import InvalidModel

DetokenizerFactory = Callable[[Sequence[int]], Detokenizer]
"""Function that makes a new detokenizer for the output that follows these prompt ids."""

MAX_SHOWN_CHARS = 200
"""Limit of the text that names the parts of an unsupported decoder in an error."""

_Piece = TypeVar("_Piece", BytePiece, str, str | int)


class _Pieces(dict[int, _Piece]):
    """Pieces by token id, made at first use; an unknown or special token has an empty one."""

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], convert: Callable[[str], _Piece]
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._convert: Callable[[str], _Piece] = convert

    def __missing__(self, token_id: int) -> _Piece:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        piece = self._convert(token or "")
        self[token_id] = piece
        return piece


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of special tokens, which have no text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def detokenizer_factory(tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> DetokenizerFactory:
    """
    Choose the detokenizer for the `decoder` section of a tokenizer.json.

    Raises:
        InvalidModel: The decoder is unknown, or its output cannot be streamed exactly.
    """
    special_ids = special_token_ids(tokenizer)
    steps = list(_flatten(decoder))
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        byte_pieces = _Pieces(tokenizer, special_ids, _byte_piece)
        return lambda _: ByteDetokenizer(byte_pieces)
    if kinds in ([], ["WordPiece"]):
        return _word_factory(tokenizer, special_ids)
    if kinds == ["Metaspace"]:
        return _metaspace_factory(tokenizer, special_ids, steps[0])
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _piece_factory(tokenizer, special_ids, steps)
    raise _unsupported(kinds)


def _word_factory(tokenizer: Tokenizer, special_ids: frozenset[int]) -> DetokenizerFactory:
    """
    Make the factory for a WordPiece decoder or none. Both decode one token at a time and treat only
    the first differently, so each token's text is what the library makes of it after another token.
    """
    decode = " ".join if tokenizer.decoder is None else tokenizer.decoder.decode

    def first_piece(token: str) -> str:
        return decode([token]) if token else ""

    def following_piece(token: str) -> str:
        return decode(["a", token]).removeprefix("a") if token else ""

    first = _Pieces[str](tokenizer, special_ids, first_piece)
    following = _Pieces[str](tokenizer, special_ids, following_piece)
    return lambda prompt: WordDetokenizer(first, following, is_first=special_ids.issuperset(prompt))


def _metaspace_factory(
    tokenizer: Tokenizer, special_ids: frozenset[int], step: dict[str, Any]
) -> DetokenizerFactory:
    mark = step.get("replacement", "\u2581")
    pieces = _Pieces[str](tokenizer, special_ids, lambda token: token.replace(mark, " "))
    drops = step.get("prepend_scheme", "always") != "never"
    return lambda prompt: MetaspaceDetokenizer(
        pieces, drop_first_space=drops and special_ids.issuperset(prompt)
    )


def _piece_factory(
    tokenizer: Tokenizer, special_ids: frozenset[int], steps: list[dict[str, Any]]
) -> DetokenizerFactory:
    kinds = [step["type"] for step in steps]
    replacements, strip_spaces = [], 0
    for at, step in enumerate(steps):
        if step["type"] == "Replace":
            if "String" not in step["pattern"] or "Fuse" in kinds[:at]:
                raise _unsupported(kinds)
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip":
            if step["content"] != " " or step["stop"] or "Fuse" not in kinds[:at]:
                raise _unsupported(kinds)
            strip_spaces += step["start"]
    has_byte_tokens = "ByteFallback" in kinds

    def convert(token: str) -> str | int:
        if has_byte_tokens and (value := _byte_token_value(token)) is not None:
            return value
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token

    pieces = _Pieces[str | int](tokenizer, special_ids, convert)
    return lambda prompt: PieceDetokenizer(
        pieces, strip_spaces=strip_spaces if special_ids.issuperset(prompt) else 0
    )


def _flatten(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _flatten(step)


def _unsupported(kinds: list[str]) -> InvalidModel:
    shown = " + ".join(kinds)[:MAX_SHOWN_CHARS]
    return InvalidModel(
        f"tokenizer.json has the decoder {shown}, which cannot be streamed; supported "
        "are ByteLevel, Metaspace, WordPiece, none, and Replace + ByteFallback + Fuse + Strip"
    )


def _byte_token_value(token: str) -> int | None:
    """Return the byte of a token like <0x0A>; None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_of_char() -> dict[str, int]:
    """Return the bytes by the characters with which byte-level vocabularies write them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _byte_piece(token: str) -> BytePiece:
    """Return a token's piece; an added token with characters outside the table is plain text."""
    try:
        return BytePiece.of(bytes(_BYTE_OF_CHAR[char] for char in token))
    except KeyError:
        return BytePiece.of(token.encode())
