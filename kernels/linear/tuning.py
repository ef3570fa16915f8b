"""
Tile shapes of the Triton product: a table instead of a search at run time.

The order of sums depends on the weight's shape and type alone, never on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PROGRAMS_WANTED = 2 * 132
"""
Number of programs to aim for: two for each multiprocessor of an H100 or H200. Other devices are
only less well balanced.
"""

_FEWEST_TILES = 4
"""Fewest tiles of a chunk along the inner dimension: enough to keep loads in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTuning:
    """
    The tiles and chunks that a product is cut into.

    The inner dimension is cut into chunks; each is summed from zero, and chunks are added first to
    last. So a row's bits are the same whether one program computes all chunks or several do.

    Attributes:
        rows: Rows of a tile of the result; rows past the last are computed and not stored.
        columns: Columns of a tile of the result.
        depth: Elements of the inner dimension that are multiplied at once.
        chunk_tiles: Steps of `depth` in a chunk; the last chunk may have fewer.
        num_chunks: Number of chunks of the inner dimension.
        num_warps: Warps of 32 threads per program.
        num_stages: Tiles in flight at once.
    """

    rows: int
    columns: int
    depth: int
    chunk_tiles: int
    num_chunks: int
    num_warps: int
    num_stages: int


_TILES: dict[int, tuple[int, int, int, int, int]] = {
    2: (64, 128, 64, 4, 4),
    4: (32, 32, 32, 4, 2),
}
"""
Rows, columns, depth, warps and stages by bytes of a number.

64 rows are the least that Hopper's matrix instructions take, so few rows cost no more memory
traffic than many. float32 uses no tensor core and is for checking.
"""


def linear_tuning(num_columns: int, width: int, dtype: torch.dtype) -> LinearTuning:
    """
    Return the cut for a weight of shape ``[num_columns, width]``.

    Raises:
        ValueError: Numbers are not of 2 or 4 bytes.
    """
    if dtype.itemsize not in _TILES:
        raise ValueError(f"Triton's product takes numbers of 2 or 4 bytes, got {dtype}")
    rows, columns, depth, num_warps, num_stages = _TILES[dtype.itemsize]
    tiles = -(-width // depth)
    wanted = -(-_PROGRAMS_WANTED // -(-num_columns // columns))
    most = max(1, tiles // _FEWEST_TILES)
    chunk_tiles = -(-tiles // min(wanted, most))
    return LinearTuning(
        rows=rows,
        columns=columns,
        depth=depth,
        chunk_tiles=chunk_tiles,
        num_chunks=-(-tiles // chunk_tiles),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def splits(tuning: LinearTuning, *, num_rows: int, num_columns: int) -> bool:
    """Tell whether each chunk gets its own program; otherwise one computes all, in order."""
    programs = -(-num_rows // tuning.rows) * -(-num_columns // tuning.columns)
    return tuning.num_chunks > 1 and programs < _PROGRAMS_WANTED
