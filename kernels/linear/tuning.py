"""
Tile shapes of the Triton product: a table instead of a search at run time.

Everything that orders a sum depends on the weight's shape and type alone, never on how many rows
there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PROGRAMS_WANTED = 2 * 132
"""Two for each multiprocessor of an H100 or H200; for other devices only less well balanced."""

_FEWEST_TILES = 4
"""Of a chunk, along the inner dimension: enough to keep loads on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTuning:
    """
    How a product is cut.

    The inner dimension is cut into chunks; each is summed from zero, and chunks are added first to
    last. So a row's bits are the same whether one program computes all chunks or several do.

    Attributes:
        rows: Of a tile of the result; rows that are not there are computed and not kept.
        columns: Of a tile of the result.
        depth: Of the inner dimension, multiplied at once.
        chunk_tiles: Steps of `depth` of a chunk; the last may have fewer.
        num_chunks: Of the inner dimension.
        num_warps: Of 32 threads each, per program.
        num_stages: Tiles on their way at once.
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
traffic than many. float32 takes no tensor core and is for checking.
"""


def linear_tuning(num_columns: int, width: int, dtype: torch.dtype) -> LinearTuning:
    """
    The cut for a weight of shape ``[num_columns, width]``.

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
    """Whether each chunk gets a program of its own, or one program computes all, in order."""
    programs = -(-num_rows // tuning.rows) * -(-num_columns // tuning.columns)
    return tuning.num_chunks > 1 and programs < _PROGRAMS_WANTED
