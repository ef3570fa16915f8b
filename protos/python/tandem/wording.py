"""Numbers with their nouns, for sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
