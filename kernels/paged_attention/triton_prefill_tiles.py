"""
The cut of prompts' chunks for Triton's prefill kernel: the sizes of tiles, and the tiles of a
batch.

A tile's contents and computation depend on its own row only, so that a row's bits do not depend on
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.sequences import AttentionShape, PagedSequences
from kernels.paged_attention.tuning import padded_head_dim
from kernels.rounding import power_of_two

TILE_FIELDS = 4
"""Number of columns of a table of tiles: row, first query, its position, number of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSize:
    """
    The work of one program, and its launch parameters.

    Attributes:
        rows: Queries times heads of a group in a tile, a power of two, at least 16.
        keys: Keys loaded at a time, a power of two, at least 16.
        num_warps: Warps of 32 threads.
        num_stages: Depth of pipelining.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

SHORT_ROWS = 64
"""Queries times heads of a group up to which a row is cut into small tiles."""

LONG_TILES = {
    64: TileSize(rows=128, keys=64, num_warps=8, num_stages=5),
    128: TileSize(rows=128, keys=64, num_warps=8, num_stages=5),
    256: TileSize(rows=128, keys=32, num_warps=8, num_stages=5),
}
SHORT_TILES = {
    64: TileSize(rows=64, keys=64, num_warps=4, num_stages=5),
    128: TileSize(rows=64, keys=32, num_warps=4, num_stages=5),
    256: TileSize(rows=64, keys=32, num_warps=4, num_stages=5),
}
"""
Sizes of tiles by padded head size, for long and short rows. They have five stages, because block
numbers are loaded before the keys: the pipeline shares its depth between the two, and with fewer
stages keys would be loaded only after the products before theirs were issued, and then waited for.
"""

INVARIANT_TILES = dict(SHORT_TILES)
"""Sizes of tiles by padded head size for all rows of batch-invariant attention, decodes too."""

_ODD_BLOCKS_256 = TileSize(rows=128, keys=32, num_warps=8, num_stages=2)
"""
Size of tiles for head size 256 and block sizes that are no power of two: dividing by these takes
the registers of a deeper pipeline.
"""

_FLOAT32 = TileSize(rows=16, keys=16, num_warps=4, num_stages=2)
"""
Size of tiles for float32: exact products use no tensor core and many registers; the type is for
checking.
"""


def tile_size(shape: AttentionShape, *, is_short: bool) -> TileSize:
    """
    Return the size of tiles for a geometry, from a fixed table; `is_short` is true of rows within
    `SHORT_ROWS`.

    Raises:
        ValueError: Heads are wider than 256, more than 128 share a key head, or the type is not
            bfloat16, float16 or float32.
    """
    if shape.dtype not in _DTYPES:
        raise ValueError(f"Triton's attention takes bfloat16, float16 and float32: {shape.dtype}")
    if shape.head_dim > max(LONG_TILES) or shape.group_size > LONG_TILES[64].rows:
        raise ValueError(
            f"Triton's attention takes heads of up to 256 and up to 128 of them per key "
            f"head, got {shape.head_dim} and {shape.group_size}: choose the reference"
        )
    if shape.dtype == torch.float32:
        fits_group = max(_FLOAT32.rows, power_of_two(shape.group_size))
        return TileSize(
            rows=fits_group,
            keys=_FLOAT32.keys,
            num_warps=_FLOAT32.num_warps,
            num_stages=_FLOAT32.num_stages,
        )
    padded = padded_head_dim(shape.head_dim)
    if is_short:
        return SHORT_TILES[padded]
    if padded == 256 and power_of_two(shape.block_size) != shape.block_size:
        return _ODD_BLOCKS_256
    return LONG_TILES[padded]


def invariant_tile_size(shape: AttentionShape) -> TileSize:
    """
    Return the one size for all rows of batch-invariant attention, in which a chunk's length must
    not change the arithmetic.

    Raises:
        ValueError: As in `tile_size`.
    """
    size = tile_size(shape, is_short=False)
    if shape.dtype == torch.float32:
        return size
    small = INVARIANT_TILES[padded_head_dim(shape.head_dim)]
    return small if shape.group_size <= small.rows else size


def cut_prefill(
    sequences: PagedSequences, shape: AttentionShape, rows: NDArray[np.int64]
) -> list[tuple[TileSize, NDArray[np.int32]]]:
    """
    Cut some of a batch's rows into tiles; tiles with the most keys come first.

    Returns:
        Sizes of tiles, each with a table int32 ``[N, 4]``: row of the block table, first query
        among the batch's, its position in its sequence, number of queries.
    """
    if shape.batch_invariant:
        chosen = [(invariant_tile_size(shape), rows)]
    else:
        is_short = sequences.query_len[rows].astype(np.int64) * shape.group_size <= SHORT_ROWS
        chosen = [
            (tile_size(shape, is_short=short), rows[is_short == short]) for short in (True, False)
        ]
    return [
        (size, cut_rows(sequences, shape.group_size, each, size))
        for size, each in chosen
        if len(each)
    ]


def cut_rows(
    sequences: PagedSequences, group_size: int, rows: NDArray[np.int64], size: TileSize
) -> NDArray[np.int32]:
    """Cut some of a batch's rows into tiles of one size; the result is a table of `cut_prefill`."""
    query_len = sequences.query_len.astype(np.int64)
    first_query = np.cumsum(query_len) - query_len
    per_tile = size.rows // group_size
    num_tiles = -(-query_len[rows] // per_tile)
    row = np.repeat(rows, num_tiles)
    before = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    done = (np.arange(len(row)) - before) * per_tile
    position = sequences.seq_len[row] - query_len[row] + done
    count = np.minimum(query_len[row] - done, per_tile)
    table = np.stack((row, first_query[row] + done, position, count), axis=1)
    return table[np.argsort(-position, kind="stable")].astype(np.int32)
