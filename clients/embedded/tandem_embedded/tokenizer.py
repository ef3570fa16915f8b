"""Text to token ids and back; any object of this shape can be given to an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as Backend

from tandem_embedded.errors import ConfigError


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids; special ones have none."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def bos_token_id(self) -> int | None:
        """Begins a prompt."""

    @property
    def eos_token_id(self) -> int | None:
        """Ends an output."""

    @property
    def pad_token_id(self) -> int | None:
        """Fills up; has no text."""


_PAD, _BOS, _EOS, _UNK = range(4)
_FIRST_CHAR = 4
_CHARS = "".join(map(chr, range(32, 127))) + "\n\r\t"
_FIRST_BYTE = _FIRST_CHAR + len(_CHARS)
_NUM_BYTES = 256


class SimpleTokenizer:
    """
    One id per character of printable ASCII and per UTF-8 byte of any other.

    PAD 0, BOS 1, EOS 2, UNK 3; characters 32 to 126 are 4 to 98, newline, carriage return and tab
    99 to 101, bytes 102 to 357. A prompt begins with BOS and has no EOS. `decode(encode(t)) == t`
    for every text; specials and ids outside have no text, bytes that are no UTF-8 become U+FFFD.
    """

    vocab_size = _FIRST_BYTE + _NUM_BYTES
    pad_token_id = _PAD
    bos_token_id = _BOS
    eos_token_id = _EOS
    unk_token_id = _UNK

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        ids = [_BOS]
        for char in text:
            index = _CHARS.find(char)
            if index >= 0:
                ids.append(_FIRST_CHAR + index)
            else:
                ids += [_FIRST_BYTE + byte for byte in char.encode("utf-8", "surrogatepass")]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""
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
    A `tokenizer.json`.

    Args:
        path: The file, or the directory it is in.

    Raises:
        ConfigError: There is no such file, or it is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            message = f"{file} does not exist: give a tokenizer.json, or submit token ids"
            raise ConfigError(message, reason="INVALID_MODEL")
        try:
            self._backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every unreadable file
            message = f"{file} is not a tokenizer that this version can read: {error}"
            raise ConfigError(message, reason="INVALID_MODEL") from error
        self._names = _special_names(file.with_name("tokenizer_config.json"))

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        """Begins a prompt."""
        return self._special("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Ends an output; engines go by the model's own list."""
        return self._special("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Fills up; has no text."""
        return self._special("pad_token")

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with what the tokenizer puts before every prompt."""
        return list(self._backend.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def _special(self, name: str) -> int | None:
        content = self._names.get(name)
        return None if content is None else self._backend.token_to_id(content)


def _special_names(path: Path) -> dict[str, str]:
    """Special tokens by role, as tokenizer_config.json names them; empty without one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", reason="INVALID_MODEL") from error
    names = {}
    for role in ("bos_token", "eos_token", "pad_token"):
        token = content.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[role] = token
    return names
