"""
State hash of the step link: a sum mod 2^64 that both ends update in time proportional to the
change.

    hash = sum over live slots s of generation_term(s, generation)
                                  + length_key(s, generation) * planned length
                                  + sum over its blocks of slot_key(s) * index_key(i) * block_key(b)

Every key is a mixed word, made odd if it is a factor. Because the hash is a sum, a change adds the
new term and subtracts the old one; the order of changes is irrelevant. Because lengths are factors,
a step that computes one token in each of a set of rows adds the sum of their length keys, which
stays the same as long as the set does. Products of independent keys differ between states in which
two blocks, places or slots changed roles (multilinear hashing: Carter and Wegman 1979; used here
against bugs, not against forgery). Token values are not part of the hash, as the two ends learn
them at different times.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tandem.link.batch import Int32Column

UInt64Column: TypeAlias = NDArray[np.uint64]

_GENERATION_TAG = 0x9E3779B97F4A7C15
_LENGTH_TAG = 0xD1B54A32D192ED03
_SLOT_TAG = 0x8CB92BA72F3D8DD7
_INDEX_TAG = 0xA0761D6478BD642F
_BLOCK_TAG = 0xE7037ED1A0B428DB
_WORD = (1 << 64) - 1
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(x: int) -> int:
    """Spread one-bit differences over a 64-bit word (splitmix64, Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * _FACTOR_1) & _WORD
    x = ((x ^ (x >> 27)) * _FACTOR_2) & _WORD
    return x ^ (x >> 31)


def _mixed(x: UInt64Column) -> UInt64Column:
    """Return `_mix` of each word."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTOR_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return x ^ (x >> np.uint64(31))


def _words(values: ArrayLike) -> UInt64Column:
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def _odd_keys(values: ArrayLike, tag: int) -> UInt64Column:
    return _mixed(_words(values) + np.uint64(tag)) | np.uint64(1)


def generation_term(slot: int, generation: int) -> int:
    """Return the term of a live slot's generation."""
    return _mix((_mix((slot + _GENERATION_TAG) & _WORD) + generation) & _WORD)


def length_key(slot: int, generation: int) -> int:
    """Return the factor of a live slot's planned length, which is odd."""
    return _mix((_mix((slot + _LENGTH_TAG) & _WORD) + generation) & _WORD) | 1


def slot_term(slot: int, generation: int, planned: int) -> int:
    """Return the sum of a live slot's terms without those of its blocks; not reduced."""
    return generation_term(slot, generation) + length_key(slot, generation) * planned


def block_terms(slot: ArrayLike, index: ArrayLike, block: ArrayLike) -> UInt64Column:
    """
    Return the terms of `(slot, index in table, block)` triples, shape ``[N]``, computed anew;
    `BlockKeys` returns the same sums faster.
    """
    keys = _odd_keys(slot, _SLOT_TAG) * _odd_keys(index, _INDEX_TAG)
    terms: UInt64Column = keys * _odd_keys(block, _BLOCK_TAG)
    return terms


class BlockKeys:
    """
    Keys of every slot, table index and block of one geometry, computed once.

    A lookup by numpy's own index type is five times faster than by any other type.
    """

    __slots__ = ("_block", "_index", "_slot")

    def __init__(self, num_slots: int, max_blocks_per_slot: int, num_blocks: int) -> None:
        self._slot = _odd_keys(np.arange(num_slots), _SLOT_TAG)
        self._index = _odd_keys(np.arange(max_blocks_per_slot), _INDEX_TAG)
        self._block = _odd_keys(np.arange(num_blocks + 1), _BLOCK_TAG)

    def sum_of_entries(
        self, slot: NDArray[np.intp], index: NDArray[np.intp], block: NDArray[np.intp] | Int32Column
    ) -> int:
        """Return the sum of the terms of table entries, given in three columns; not reduced."""
        return self.sum_with_keys(self._slot[slot], index, block)

    def of_slots(self, slot: NDArray[np.intp]) -> UInt64Column:
        """Return the keys of some slots, for `sum_with_keys`."""
        return self._slot[slot]

    def sum_with_keys(
        self, keys: UInt64Column, index: NDArray[np.intp], block: NDArray[np.intp] | Int32Column
    ) -> int:
        """Return `sum_of_entries` of slots with these keys."""
        block = block.astype(np.intp, copy=False)
        return int((keys * self._index[index]).dot(self._block[block]))

    def sum_of_table(self, slot: int, blocks: Int32Column) -> int:
        """Return the sum of the terms of a slot's table ``[num_blocks_held]``; not reduced."""
        keys = self._index[: len(blocks)].dot(self._block[blocks.astype(np.intp)])
        return int(self._slot[slot]) * int(keys)


class StateHash:
    """Running sum of the hash; its owner adds and removes terms as slot state changes."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, terms: int) -> None:
        """Add a term, or a sum of terms, of new state."""
        self.value = (self.value + terms) & _WORD

    def remove(self, terms: int) -> None:
        """Subtract a term, or a sum of terms, of old state."""
        self.value = (self.value - terms) & _WORD
