"""
Tokenizers of an embedded engine; an engine takes any object with the interface `Tokenizer`.

A model's tokenizer.json is read by the code of the gRPC server, so that both give a text the same
ids and an output the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from scheduler_svc.frontend.text.chat_template import Conversation
from scheduler_svc.frontend.text.detokenizer import (
    REPLACEMENT,
    Decoded,
    Detokenizer,
    NoText,
    decode_all,
)
from scheduler_svc.frontend.text.tokenizer import TextModel
from tandem.errors import TandemError
from tandem_embedded.errors import ConfigError, engine_error


class Tokenizer(Protocol):
    """Interface of a tokenizer that an engine can use."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; special ids have no text."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; ids are in [0, vocab_size)."""

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a prompt."""

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends an output."""

    @property
    def pad_token_id(self) -> int | None:
        """Id for padding, which has no text."""


@runtime_checkable
class StreamingTokenizer(Protocol):
    """Optional interface of a tokenizer that turns an output into text token by token."""

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the output that follows `prompt`."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """Optional interface of a tokenizer that encodes conversations."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, max_prompt_len: int
    ) -> list[int]:
        """Return the ids of a conversation; messages have "role" and "content"."""


def output_text(tokenizer: Tokenizer | None, prompt: Sequence[int], output: Sequence[int]) -> str:
    """Return the text of a whole output that follows `prompt`; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    if isinstance(tokenizer, StreamingTokenizer):
        return decode_all(tokenizer.detokenizer(prompt), output)
    return tokenizer.decode(output)


def detokenizer_of(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> Detokenizer:
    """Return a detokenizer for the output that follows `prompt`, for any tokenizer or None."""
    if tokenizer is None:
        return NoText()
    if isinstance(tokenizer, StreamingTokenizer):
        return tokenizer.detokenizer(prompt)
    return _Redecoding(tokenizer)


class _Redecoding:
    """
    Detokenizer that decodes the whole output for each token, for tokenizers that can only decode.

    Text is certain if it continues the text returned before and does not end in U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._told = ""

    def push(self, token_id: int) -> Decoded:
        """Add the next token; return the new text if it is certain."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT) or not text.startswith(self._told):
            return Decoded(None, "", False)
        new, self._told = text[len(self._told) :], text
        return Decoded(None, new, True)

    def plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Return None: each token must be pushed, since later ones are decoded with it."""
        del token_ids
        return None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add; half a character is U+FFFD."""
        before = self._tokenizer.decode(self._ids)
        return self._tokenizer.decode([*self._ids, token_id]).removeprefix(before).encode()

    def flush(self) -> str:
        """End the output, and return the rest of the text, which was not certain."""
        return self._tokenizer.decode(self._ids)[len(self._told) :]


_PAD, _BOS, _EOS, _UNK = range(4)
_FIRST_CHAR = 4
_CHARS = "".join(map(chr, range(32, 127))) + "\n\r\t"
_FIRST_BYTE = _FIRST_CHAR + len(_CHARS)
_NUM_BYTES = 256


class SimpleTokenizer:
    """
    A tokenizer with one id per printable ASCII character and per UTF-8 byte of any other character.

    PAD is 0, BOS 1, EOS 2, UNK 3; characters 32 to 126 are 4 to 98, newline, carriage return and
    tab 99 to 101, bytes 102 to 357. A prompt begins with BOS and has no EOS. `decode(encode(t)) ==
    t` for every text; special ids and ids out of range have no text, and bytes that are not UTF-8
    become U+FFFD.
    """

    vocab_size = _FIRST_BYTE + _NUM_BYTES
    pad_token_id = _PAD
    bos_token_id = _BOS
    eos_token_id = _EOS
    unk_token_id = _UNK

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        ids = [_BOS]
        for char in text:
            index = _CHARS.find(char)
            if index >= 0:
                ids.append(_FIRST_CHAR + index)
            else:
                ids += [_FIRST_BYTE + byte for byte in char.encode("utf-8", "surrogatepass")]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""
        raw = bytearray()
        for token in token_ids:
            if _FIRST_CHAR <= token < _FIRST_BYTE:
                raw.append(ord(_CHARS[token - _FIRST_CHAR]))
            elif _FIRST_BYTE <= token < self.vocab_size:
                raw.append(token - _FIRST_BYTE)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """
    The `tokenizer.json` of a model directory, with the files beside it, read as the services do.

    No part of a text is taken for a special token, no text is truncated or padded, and tokens that
    the tokenizer adds after a text are left out.

    Args:
        path: The file, or its directory.

    Raises:
        ConfigError: There is no such file, or it has no tokenizer that can be used.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file() or file.name != "tokenizer.json":
            message = f"{file} does not exist: give a tokenizer.json, or submit token ids"
            if file.is_file():
                message = f"{file} must have the name tokenizer.json"
            raise ConfigError(message, reason="INVALID_MODEL")
        try:
            self._text = TextModel.load(file.parent)
        except TandemError as error:
            raise engine_error(error) from error

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; ids are in [0, vocab_size)."""
        return self._text.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a prompt."""
        return self._text.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends an output; engines use the model's own list instead."""
        return self._text.special_token_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id for padding, which has no text."""
        return self._text.special_token_id("pad_token")

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with those that the tokenizer puts before every prompt."""
        return self._text.encode_text(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, max_prompt_len: int
    ) -> list[int]:
        """Return the ids of a conversation in the model's chat template; see `TextModel`."""
        return self._text.encode_chat(
            Conversation(messages=messages), max_prompt_len=max_prompt_len
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without a prompt; for a request's output use `detokenizer`."""
        return decode_all(self.detokenizer(()), token_ids)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the output that follows `prompt`."""
        return self._text.detokenizer(prompt)


def tokenizer_of(model_dir: Path) -> HuggingFaceTokenizer | None:
    """Return the tokenizer of a model directory; None if it has no tokenizer.json."""
    has_file = (model_dir / "tokenizer.json").is_file()
    return HuggingFaceTokenizer(model_dir) if has_file else None
