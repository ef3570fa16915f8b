"""The cut of the Triton sampler's work: chosen by shapes alone, so that a graph can capture it."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 1024
"""Ids that a program reads at a time: 16 bytes per thread of 4 warps in two-byte types."""

SPLITS = ((16, 2048), (64, 4096))
WIDEST_SPLIT = 8192
"""
Ids per program, by the largest number of rows: few rows are cut finer, to fill the device. The cut
changes no token: largest values, lowest ids and sums of integers do not depend on it.
"""

ROWS_PER_SEARCH = 256
"""Rows for which thresholds are searched at a time; each takes 4 bytes per id meanwhile."""


ROW_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "position",
    "choice",
    "best",
    "lowest",
    "token",
    "valid",
)
"""
Arguments of kernels with one entry per row: one compiled kernel serves them at any alignment, so
that parts of a packed buffer do not cause a compilation while serving.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of a row's ids into `num_splits` parts of `split` ids, read `tile` at a time."""

    tile: int
    split: int
    num_splits: int

    @classmethod
    def of(cls, num_rows: int, vocab_size: int) -> Cut:
        """Choose the cut for so many rows and ids; no part is longer than a row needs."""
        tile = min(TILE, _power_of_2(vocab_size))
        split = next((split for rows, split in SPLITS if num_rows <= rows), WIDEST_SPLIT)
        split = min(split, -(-vocab_size // tile) * tile)
        return cls(tile, split, -(-vocab_size // split))

    @property
    def padded_splits(self) -> int:
        """`num_splits` rounded up to a power of two, as Triton needs it."""
        return _power_of_2(self.num_splits)


def search_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of the keys that a search for thresholds holds beside the logits."""
    return min(num_rows, ROWS_PER_SEARCH) * vocab_size * 4


def _power_of_2(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()
