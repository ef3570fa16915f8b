"""Words that messages share: counts, sizes of memory, and what a misspelt name may mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

GIB = 2**30
"""Bytes of a GiB."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" or "2 tokens"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def gib(num_bytes: float, form: str = ".2f") -> str:
    """Return a number of bytes in GiB, without the unit, such as "1.50"; `form` formats it."""
    return f"{num_bytes / GIB:{form}}"


def nearest(name: str, known: Iterable[str], *, least_alike: float = 0.6) -> str | None:
    """
    Return the name that a misspelt one most likely means.

    Args:
        name: Name that does not exist.
        known: Names that do.
        least_alike: Least similarity of a name that counts, over 0 to 1 (the same).

    Returns:
        One of the known names, or None if none is similar enough.
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=least_alike)
    return found[0] if found else None
