"""JSON files with one thing wrong, as hypothesis draws them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

WRONG_VALUES = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 2**31, 2**63, 10**30, 10**400, -(10**400)),
    *(0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "../x", "\0", "\ud800", "a" * 5000, "silu"),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}),
)
_REMOVED = object()


def damaged(content: Any) -> st.SearchStrategy[bytes]:
    """
    Draw the JSON of `content` with one value, at any depth, replaced by a wrong one or removed.
    """

    def damage(place: tuple[Any, ...], value: Any) -> bytes:
        return json.dumps(_replaced(content, place, value)).encode()

    places = st.sampled_from(list(_places(content)))
    return st.builds(damage, places, st.sampled_from([*WRONG_VALUES, _REMOVED]))


def damaged_bytes(content: bytes, within: int = 2000) -> st.SearchStrategy[bytes]:
    """Draw the content cut off anywhere, or with some of its first bytes overwritten."""
    last = min(len(content), within) - 1
    one = st.tuples(st.integers(0, last), st.integers(0, 255))

    def overwrite(changes: list[tuple[int, int]]) -> bytes:
        spoilt = bytearray(content)
        for at, value in changes:
            spoilt[at] = value
        return bytes(spoilt)

    cut = st.integers(0, len(content)).map(lambda end: content[:end])
    return cut | st.lists(one, min_size=1, max_size=4).map(overwrite)


def _places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    children: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(content, dict):
        children = iter(content.items())
    elif isinstance(content, list):
        children = iter(list(enumerate(content))[:20])
    for key, child in children:
        yield from _places(child, (*place, key))


def _replaced(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return None if value is _REMOVED else value
    content = copy.deepcopy(content)
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    if value is _REMOVED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return content
