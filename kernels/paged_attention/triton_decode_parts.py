"""Parts that the kernels of decode attention share: the cut of a row, one chunk, and merging."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunks_of_row(
    length: tl.tensor,
    TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """
    Return the first tile with a visible key, the end of the last such tile, tiles per chunk, and
    number of chunks.

    Each tile has a visible key, so that no chunk's largest score is minus infinity.
    """
    first_tile = length * 0
    if WINDOW > 0:
        first_tile = tl.maximum(length - WINDOW, 0) // TILE
    end_tile = tl.cdiv(length, TILE)
    chunk_tiles = tl.cdiv(end_tile - first_tile, MAX_CHUNKS)
    chunk_tiles = tl.maximum(chunk_tiles, MIN_CHUNK // TILE)
    return first_tile, end_tile, chunk_tiles, tl.cdiv(end_tile - first_tile, chunk_tiles)


@triton.jit
def empty_sums(
    HEADS: tl.constexpr, PADDED_D: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Return the sums over no keys, float32: largest score in base 2 ``[HEADS]``, sum of weights
    ``[HEADS]``, sum of weighted values ``[HEADS, PADDED_D]``.
    """
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    return largest, tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, PADDED_D], tl.float32)


@triton.jit
def merge_sums(sums: tl.tuple, part: tl.tuple) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Merge two sums to the sums over the keys of both.

    Products are added by `tl.fma`: the compiler then has no choice of rounding, and every kernel
    gives the same bits.
    """
    largest = tl.maximum(sums[0], part[0])
    kept = tl.exp2(sums[0] - largest)
    added = tl.exp2(part[0] - largest)
    total = tl.fma(sums[1], kept, part[1] * added)
    return largest, total, tl.fma(sums[2], kept[:, None], part[2] * added[:, None])


@triton.jit
def mean(sums: tl.tuple, out: tl.tensor) -> tl.tensor:
    """Return the weighted mean of values in the type that `out` points at; zeros over no keys."""
    total = tl.where(sums[1] > 0, sums[1], 1.0)
    return (sums[2] / total[:, None]).to(out.dtype.element_ty)


@triton.jit
def _places(
    table_row: tl.tensor,
    tile: tl.tensor,
    position: tl.tensor,
    seen: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return a tile's cache positions, int64 ``[TILE]``; unseen positions need a mask."""
    if BLOCK % TILE == 0:  # one block holds the tile: one load for all
        start = tile * TILE
        block = tl.load(table_row + start // BLOCK).to(tl.int64)
        return block * BLOCK + start % BLOCK + tl.arange(0, TILE)
    else:  # noqa: RET505  # the compiler needs both branches
        block = tl.load(table_row + position // BLOCK, mask=seen, other=0).to(tl.int64)
        return block * BLOCK + position % BLOCK


@triton.jit
def attend_chunk(
    query: tl.tensor,
    keys: tl.tensor,
    table_row: tl.tensor,
    length: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Compute the sums over tiles begin..end of one row.

    `keys` points at the head's key of the cache's first position.
    """
    dim = tl.arange(0, PADDED_D)
    largest, total, weighted = empty_sums(HEADS, PADDED_D)
    for tile in range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        seen = position < length
        if WINDOW > 0:
            seen &= position >= length - WINDOW
        place = _places(table_row, tile, position, seen, BLOCK, TILE) * (2 * KV_HEADS * D)
        key_mask = seen[None, :] & (dim[:, None] < D)
        key = tl.load(keys + place[None, :] + dim[:, None], mask=key_mask, other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale_log2  # [HEADS, TILE]
        score = tl.where(seen[None, :], score, float("-inf"))
        top = tl.maximum(largest, tl.max(score, 1))
        probability = tl.exp2(score - top[:, None])
        kept = tl.exp2(largest - top)
        total = total * kept + tl.sum(probability, 1)
        value_at = keys + KV_HEADS * D + place[:, None] + dim[None, :]
        value_mask = seen[:, None] & (dim[None, :] < D)
        value = tl.load(value_at, mask=value_mask, other=0.0)  # [TILE, PADDED_D]
        weighted = tl.dot(
            probability.to(value.dtype), value, weighted * kept[:, None], input_precision="ieee"
        )
        largest = top
    return largest, total, weighted
