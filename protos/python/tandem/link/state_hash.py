"""
The step link's state hash: a sum mod 2^64 that both ends keep up to date in time proportional to
the change.

Each live slot contributes one term for its generation, one for its planned length and one for each
of its blocks. Because the hash is a sum, a change adds the new term and subtracts the old one; the
order of changes is irrelevant. Token values do not enter: they are known to the two ends at
different times.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInt64Column: TypeAlias = NDArray[np.uint64]

_GENERATION_TAG = np.uint64(0x9E3779B97F4A7C15)
_LENGTH_TAG = np.uint64(0xD1B54A32D192ED03)
_BLOCK_TAG = np.uint64(0x8CB92BA72F3D8DD7)
_WORD = (1 << 64) - 1


_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INDEX_SHIFT = np.uint64(32)


def _mix(x: UInt64Column) -> UInt64Column:
    """Finalise 64-bit words so that one-bit differences spread (splitmix64, Steele et al. 2014)."""
    x = x ^ (x >> _SHIFT_1)
    x *= _FACTOR_1
    x ^= x >> _SHIFT_2
    x *= _FACTOR_2
    x ^= x >> _SHIFT_3
    return x


def _words(values: ArrayLike) -> UInt64Column:
    if isinstance(values, np.ndarray) and values.ndim:
        return values.astype(np.uint64)
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def generation_terms(slot: ArrayLike, generation: ArrayLike) -> UInt64Column:
    """Terms of `(slot, generation)` pairs, shape ``[N]``."""
    return _mix(_mix(_words(slot) + _GENERATION_TAG) + _words(generation))


def length_terms(slot: ArrayLike, planned: ArrayLike) -> UInt64Column:
    """Terms of `(slot, planned length)` pairs, shape ``[N]``."""
    return _mix(_mix(_words(slot) + _LENGTH_TAG) + _words(planned))


def block_terms(slot: ArrayLike, index: ArrayLike, block: ArrayLike) -> UInt64Column:
    """Terms of `(slot, index in table, block)` triples, shape ``[N]``."""
    return _mix(_mix(_words(slot) + _BLOCK_TAG) + (_words(index) << _INDEX_SHIFT) + _words(block))


class StateHash:
    """The running sum; its owner adds and removes terms as slot state changes."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, terms: UInt64Column) -> None:
        """Account for state that appeared."""
        self.value = (self.value + int(terms.sum(dtype=np.uint64))) & _WORD

    def remove(self, terms: UInt64Column) -> None:
        """Account for state that went."""
        self.value = (self.value - int(terms.sum(dtype=np.uint64))) & _WORD
