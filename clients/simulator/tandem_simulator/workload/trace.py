"""
Workloads read from a file of JSON lines, one request each.

    {"arrival_s": 0.52, "prompt_len": 900, "output_len": 120}
    {"arrival_s": 0.61, "token_ids": [5, 6, 7], "output_len": 8, "max_tokens": 64, "tenant": "a"}
    {"arrival_s": 0.9, "prompt_len": 90, "prefix_group": "bot", "prefix_len": 50, "output_len": 4}

| key | meaning | default |
|---|---|---|
| arrival_s | arrival, seconds on the virtual clock; lines may have any order | required |
| prompt_len | tokens of the prompt; their ids are made up | required |
| token_ids | ids of the prompt, in place of prompt_len | |
| output_len | tokens that the model produces, EOS included | required |
| max_tokens | most tokens that the request asks for | output_len |
| prefix_group | group of requests that begin with the same tokens | none |
| prefix_len | number of these tokens | required with prefix_group |
| priority | priority; lower goes first | 0 |
| tenant | name of its tenant | no tenant |
| cache_salt | salt of the prefix cache; only requests with the same one share KV | none |
| choices | completions of the prompt | 1 |
| timeout_s | seconds from its arrival to its deadline | none |

Empty lines are skipped.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tandem.errors import InvalidConfig
from tandem.link.batch import Int32Column
from tandem_simulator.executor.model_tokens import FIRST_ID, VOCAB_SIZE
from tandem_simulator.workload.ask import Ask, random_ids

_GROUP, _LINE = 3, 4
_KNOWN = (
    "arrival_s", "prompt_len", "token_ids", "output_len", "max_tokens", "prefix_group",
    "prefix_len", "priority", "tenant", "cache_salt", "choices", "timeout_s",
)  # fmt: skip


class Trace:
    """Requests of a trace."""

    def __init__(self, asks: list[Ask]) -> None:
        self._asks = sorted(asks, key=lambda ask: ask.arrival_s)

    @property
    def max_handles(self) -> int:
        """Completions that it asks for, all choices counted."""
        return sum(ask.num_choices for ask in self._asks)

    def opening(self) -> Iterator[Ask]:
        """Return all requests, in order of arrival; those of equal time as in the file."""
        return iter(self._asks)

    def follow(self, ask: Ask, outputs: Int32Column, now: float) -> list[Ask]:
        """Return nothing: a trace fixes all arrivals."""
        del ask, outputs, now
        return []


def read_trace(path: Path, seed: int) -> Trace:
    """
    Read a file in the form above; tokens that it does not give are drawn from `seed`.

    Raises:
        InvalidConfig: The file cannot be read or has no request, or a line is wrong; the error
            names the first one by number.
    """
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not UTF-8: {error}") from error
    asks = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                asks.append(_parse(line, number, seed))
            except InvalidConfig as error:
                raise InvalidConfig(f"{path}, line {number}: {error.message}") from None
    if not asks:
        raise InvalidConfig(f"{path} has no request: write one JSON object per line")
    return Trace(asks)


def _parse(line: str, number: int, seed: int) -> Ask:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidConfig(f"a JSON object was expected, got {line.strip()[:40]}")
    unknown = [key for key in values if key not in _KNOWN]
    if unknown:
        raise InvalidConfig(f"unknown key {unknown[0]!r}; known: {', '.join(_KNOWN)}")
    output_len = _whole(values, "output_len", least=1)
    return Ask(
        arrival_s=_seconds(values, "arrival_s"),
        prompt=_prompt(values, number, seed),
        output_len=output_len,
        max_tokens=_whole(values, "max_tokens", least=1, default=output_len),
        priority=_whole(values, "priority", least=-(2**31), default=0),
        tenant=_text(values, "tenant"),
        cache_salt=_text(values, "cache_salt").encode(),
        num_choices=_whole(values, "choices", least=1, default=1),
        timeout_s=_seconds(values, "timeout_s") if "timeout_s" in values else None,
    )


def _prompt(values: dict[str, Any], number: int, seed: int) -> Int32Column:
    if ("prompt_len" in values) == ("token_ids" in values):
        raise InvalidConfig("exactly one of prompt_len and token_ids is needed")
    if "token_ids" in values:
        return _token_ids(values)
    prompt_len = _whole(values, "prompt_len", least=1)
    body = random_ids(seed, _LINE, number, prompt_len)
    if "prefix_group" not in values:
        if "prefix_len" in values:
            raise InvalidConfig("prefix_len means nothing without prefix_group")
        return body
    prefix_len = _whole(values, "prefix_len", least=0)
    if prefix_len > prompt_len:
        raise InvalidConfig(f"prefix_len {prefix_len} is over prompt_len {prompt_len}")
    group = zlib.crc32(json.dumps(values["prefix_group"], sort_keys=True).encode())
    body[:prefix_len] = random_ids(seed, _GROUP, group, prefix_len)
    return body


def _token_ids(values: dict[str, Any]) -> Int32Column:
    if "prefix_group" in values or "prefix_len" in values:
        raise InvalidConfig("prefix_group goes with prompt_len, not with token_ids")
    ids = values["token_ids"]
    is_list = isinstance(ids, list) and bool(ids)
    if not is_list or not all(type(i) is int and FIRST_ID <= i < VOCAB_SIZE for i in ids):
        raise InvalidConfig(
            f"token_ids must be a list of at least one id from {FIRST_ID} to {VOCAB_SIZE - 1}"
        )
    return np.array(ids, np.int32)


def _whole(values: dict[str, Any], key: str, *, least: int, default: int | None = None) -> int:
    value = values.get(key, default)
    if type(value) is not int or not least <= value < 2**31:
        found = f"got {value!r}" if key in values else "it is missing"
        raise InvalidConfig(f"{key} must be a whole number from {least} up, {found}")
    return value


def _seconds(values: dict[str, Any], key: str) -> float:
    value = values.get(key)
    if not _is_number(value) or not (math.isfinite(value) and value >= 0):
        found = f"got {value!r}" if key in values else "it is missing"
        raise InvalidConfig(f"{key} must be seconds, 0 or more, {found}")
    return float(value)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(values: dict[str, Any], key: str) -> str:
    value = values.get(key, "")
    if not isinstance(value, str):
        raise InvalidConfig(f"{key} must be text, got {value!r}")
    return value
