"""The cut of the Triton sampler's work: chosen by shapes alone, so that a graph can capture it."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.rounding import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTiles:
    """
    Sizes of a program's work.

    Attributes:
        tile: Ids that a program reads at a time; 1024 are 16 bytes per thread of 4 warps in
            two-byte types.
        split: Ids of a program, a multiple of `tile`.
        num_warps: Warps of 32 threads per program.
    """

    tile: int
    split: int
    num_warps: int = 4


TILES = {
    16: SamplingTiles(tile=1024, split=2048),
    64: SamplingTiles(tile=1024, split=4096),
    None: SamplingTiles(tile=1024, split=8192),
}
"""
Tiles by the largest number of rows, the last for any: few rows are cut finer, to fill the device.
The cut changes no token: largest values, lowest ids and sums of integers do not depend on it.
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
    """
    A cut of a row's ids into `num_splits` parts of `split` ids, read `tile` at a time by
    `num_warps` warps.
    """

    tile: int
    split: int
    num_splits: int
    num_warps: int

    @classmethod
    def of(cls, num_rows: int, vocab_size: int) -> Cut:
        """Choose the cut for so many rows and ids; no part is longer than a row needs."""
        found = next(tiles for rows, tiles in TILES.items() if rows is None or num_rows <= rows)
        return cls.into(found, vocab_size)

    @classmethod
    def into(cls, tiles: SamplingTiles, vocab_size: int) -> Cut:
        """Return the cut of so many ids into these tiles."""
        tile = min(tiles.tile, power_of_two(vocab_size))
        split = min(tiles.split, -(-vocab_size // tile) * tile)
        return cls(tile, split, -(-vocab_size // split), tiles.num_warps)

    @property
    def padded_splits(self) -> int:
        """`num_splits` rounded up to a power of two, as Triton needs it."""
        return power_of_two(self.num_splits)


def search_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of the keys that a search for thresholds holds beside the logits."""
    return min(num_rows, ROWS_PER_SEARCH) * vocab_size * 4
