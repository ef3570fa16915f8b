"""How the Triton sampler cuts its work: chosen by shapes alone, so that a graph can hold it."""

from __future__ import annotations

from dataclasses import dataclass

import triton

TILE = 1024
"""Ids that a program looks at at a time: 16 bytes per thread of 4 warps in two-byte types."""

SPLITS = ((16, 2048), (64, 4096))
WIDEST_SPLIT = 8192
"""Ids per program, by the number of rows up to which: few rows are cut finer to fill the device.
How a row is cut changes no token: largest values, lowest ids and sums of integers do not depend on
it."""

ROWS_PER_SEARCH = 256
"""Rows that thresholds are searched for at a time; each keeps 4 bytes per id meanwhile."""


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
"""Arguments read or written one entry per row: one compiled kernel serves them wherever they lie,
so that parts of a packed buffer do not compile anew while serving."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A row's ids in `num_splits` parts of `split`, looked at by `tile`."""

    tile: int
    split: int
    num_splits: int

    @classmethod
    def of(cls, num_rows: int, vocab_size: int) -> Cut:
        """How so many rows of so many ids are cut; no part is longer than a row asks for."""
        tile = min(TILE, triton.next_power_of_2(vocab_size))
        split = next((split for rows, split in SPLITS if num_rows <= rows), WIDEST_SPLIT)
        split = min(split, triton.cdiv(vocab_size, tile) * tile)
        return cls(tile, split, triton.cdiv(vocab_size, split))

    @property
    def padded_splits(self) -> int:
        """`num_splits` as Triton counts: the next power of two."""
        padded: int = triton.next_power_of_2(self.num_splits)
        return padded
