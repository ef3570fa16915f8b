"""
Tile shapes of the Triton product: a table instead of a search at run time.

The order of sums depends on the width of a chunk and the type alone, never on the number of rows or
columns: a rank has some columns of a weight.
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
"""Fewest tiles of a part along the inner dimension: enough to keep loads in flight."""

_MOST_PARTS = 9
"""Most parts of a chunk: enough for the few columns of a decode's narrower weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTuning:
    """
    The tiles and parts that a chunk of a product is cut into.

    A chunk of the inner dimension is cut into parts; each is summed from zero, and parts are added
    first to last. So a number's bits are the same whether one program computes all parts of a chunk
    or several do. Chunks are added as a binary tree.

    Attributes:
        rows: Rows of a tile of the result; rows past the last are computed and not stored.
        columns: Columns of a tile of the result.
        depth: Elements of the inner dimension that are multiplied at once.
        part_tiles: Steps of `depth` in a part; the last part may have fewer.
        num_parts: Number of parts of a chunk.
        num_warps: Warps of 32 threads per program.
        num_stages: Tiles in flight at once.
    """

    rows: int
    columns: int
    depth: int
    part_tiles: int
    num_parts: int
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


def linear_tuning(width: int, dtype: torch.dtype) -> LinearTuning:
    """
    Return the cut for chunks of a width.

    Raises:
        ValueError: Numbers are not of 2 or 4 bytes.
    """
    if dtype.itemsize not in _TILES:
        raise ValueError(f"Triton's product takes numbers of 2 or 4 bytes, got {dtype}")
    rows, columns, depth, num_warps, num_stages = _TILES[dtype.itemsize]
    tiles = -(-width // depth)
    part_tiles = -(-tiles // max(1, min(_MOST_PARTS, tiles // _FEWEST_TILES)))
    return LinearTuning(
        rows=rows,
        columns=columns,
        depth=depth,
        part_tiles=part_tiles,
        num_parts=-(-tiles // part_tiles),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def splits(tuning: LinearTuning, *, num_rows: int, num_columns: int, num_chunks: int = 1) -> bool:
    """Tell whether each part gets its own program; otherwise one computes a chunk's, in order."""
    programs = -(-num_rows // tuning.rows) * -(-num_columns // tuning.columns) * num_chunks
    return tuning.num_parts > 1 and programs < _PROGRAMS_WANTED
