"""Typed reading of a model's JSON files: every error names the file, the key and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import InvalidModel
from tandem.sampling_params import broken_range

MAX_JSON_BYTES = 64 << 20
"""Most bytes of a file that describes a model; the index of a thousand shards has a few MB."""
MAX_SIZE = 2**31 - 1
"""Largest integer by default: token ids, positions and sizes are int32."""

_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class JsonFields:
    """
    One JSON object.

    The value of an absent key comes from `defaults`; if it is absent there too, or null, from the
    caller.
    """

    path: Path
    content: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, defaults: Mapping[str, Any] | None = None) -> JsonFields:
        """
        Read a file.

        Raises:
            InvalidModel: The file is unreadable, too large, not JSON, or not an object.
        """
        try:
            num_bytes = path.stat().st_size
            if num_bytes > MAX_JSON_BYTES:
                raise InvalidModel(
                    f"{path} has {num_bytes} bytes, more than the {MAX_JSON_BYTES} that a file of "
                    "settings may have"
                )
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidModel(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
            raise InvalidModel(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise InvalidModel(f"{path} must hold a JSON object, not {type(content).__name__}")
        return cls(path, content, defaults or {})

    def get(self, key: str) -> Any:
        """Return the value as it is; None if there is none."""
        return self.content.get(key, self.defaults.get(key))

    def inner(self, key: str) -> JsonFields | None:
        """
        Return a nested object; None if there is none.

        Raises:
            InvalidModel: The value is not an object.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return JsonFields(self.path, value, {})

    def positive_int(self, key: str, default: int | None = None, *, at_most: int = MAX_SIZE) -> int:
        """Return an integer from 1 to `at_most`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a positive integer", value)
        if value > at_most:
            raise self._wrong(key, f"at most {at_most}", value)
        return value

    def whole_number(self, key: str) -> int:
        """Return an integer of at least 0."""
        value = self._value(key, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "0 or a positive integer", value)
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._value(key, default)
        if not _is_number(value) or not value > 0:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def optional_int(self, key: str) -> int | None:
        """Return an integer in the range of the sampling parameter of this name, or None."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        self._check_range(key, value)
        return value

    def optional_float(self, key: str) -> float | None:
        """Return a finite number in the range of the sampling parameter of this name, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not _is_number(value):
            raise self._wrong(key, "a finite number", value)
        self._check_range(key, float(value))
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """Return the ids of a value that is one id, a list or null; all are in the vocabulary."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self._wrong(key, "a token id or a list of token ids", value)
            if not 0 <= token < vocab_size:
                raise self._wrong(key, f"in [0, {vocab_size}), the vocabulary", token)
        return list(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise InvalidModel(f"{self.path} lacks {key}")
        return value

    def _check_range(self, key: str, value: float) -> None:
        rule = broken_range(key, value)
        if rule is not None:
            raise InvalidModel(f"{self.path}: {key} {rule}, got {shown(self.get(key))}")

    def _wrong(self, key: str, expected: str, value: object) -> InvalidModel:
        return InvalidModel(f"{self.path}: {key} must be {expected}, got {shown(value)}")


def shown(value: object) -> str:
    """Format a value for an error message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # the integer is larger than any float
        return False
