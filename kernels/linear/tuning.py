"""
Tile shapes of the Triton product: a table instead of a search at run time.

The order of sums depends on the width of a chunk and the type alone, never on the number of rows or
columns: a rank has some columns of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NUM_MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200; other devices are only less well balanced."""

_FEWEST_TILES = 4
"""Fewest tiles of a part along the inner dimension: enough to keep loads in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTiles:
    """
    The tiles of all products in numbers of one size.

    Attributes:
        rows: As in `LinearTuning`, like `columns`, `depth`, `num_warps` and `num_stages`.
        most_parts: Most parts of a chunk: enough for the few columns of a decode's narrower
            weights.
        programs_per_multiprocessor: Number of programs to aim for.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    most_parts: int = 9
    programs_per_multiprocessor: int = 2


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
        programs_wanted: Number of programs to aim for.
    """

    rows: int
    columns: int
    depth: int
    part_tiles: int
    num_parts: int
    num_warps: int
    num_stages: int
    programs_wanted: int


TILES: dict[int, LinearTiles] = {
    2: LinearTiles(rows=64, columns=128, depth=64, num_warps=4, num_stages=4),
    4: LinearTiles(rows=32, columns=32, depth=32, num_warps=4, num_stages=2),
}
"""
Tiles by bytes of a number.

64 rows are the least that Hopper's matrix instructions take, so few rows cost no more memory
traffic than many. float32 uses no tensor core and is for checking.
"""


def linear_tuning(width: int, dtype: torch.dtype) -> LinearTuning:
    """
    Return the cut for chunks of a width.

    Raises:
        ValueError: Numbers are not of 2 or 4 bytes.
    """
    if dtype.itemsize not in TILES:
        raise ValueError(f"Triton's product takes numbers of 2 or 4 bytes, got {dtype}")
    return cut(width, TILES[dtype.itemsize])


def cut(width: int, tiles: LinearTiles) -> LinearTuning:
    """Return the cut for chunks of a width into these tiles."""
    num_tiles = -(-width // tiles.depth)
    part_tiles = -(-num_tiles // max(1, min(tiles.most_parts, num_tiles // _FEWEST_TILES)))
    return LinearTuning(
        rows=tiles.rows,
        columns=tiles.columns,
        depth=tiles.depth,
        part_tiles=part_tiles,
        num_parts=-(-num_tiles // part_tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        programs_wanted=tiles.programs_per_multiprocessor * _NUM_MULTIPROCESSORS,
    )


def rows_to_join(num_columns: int, dtype: torch.dtype) -> int:
    """
    Return from how many rows on `splits` is false for weights of `num_columns` columns of the
    result or more, whatever their width.

    Raises:
        ValueError: Numbers are not of 2 or 4 bytes.
    """
    tuning = linear_tuning(1, dtype)  # tiles, and what is wanted, are those of any width
    row_tiles = -(-tuning.programs_wanted // -(-num_columns // tuning.columns))
    return (row_tiles - 1) * tuning.rows + 1


def splits(tuning: LinearTuning, *, num_rows: int, num_columns: int, num_chunks: int = 1) -> bool:
    """Tell whether each part gets its own program; otherwise one computes a chunk's, in order."""
    programs = -(-num_rows // tuning.rows) * -(-num_columns // tuning.columns) * num_chunks
    return tuning.num_parts > 1 and programs < tuning.programs_wanted
