"""Rounding of sizes to those that compiled kernels take."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()
