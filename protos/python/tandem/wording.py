"""Texts of numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" or "2 tokens"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
