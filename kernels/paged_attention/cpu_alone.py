"""
Batch-invariant paged attention on the CPU: a query's bits depend only on its own sequence and
position, not on the batch or the chunk that it is computed in.

Tiles of queries begin at fixed positions, and each query has a fixed place in its tile; a tile's
keys end at a fixed position too. Missing queries and keys are filled up and masked. So the shape of
each call depends on the position alone. Tiles and heads run one by one in one thread, since a
library may choose its code by the number of tiles, heads or threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.linear.tiles import in_one_thread
from kernels.paged_attention.sequences import AttentionShape, PagedSequences

QUERIES = 8
"""Positions of a tile. Fewer would waste less in decodes, more would save calls in prompts."""

KEYS = 128
"""Multiple to which a tile's keys are filled up."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """
    A tile of some queries of one row.

    `query_place` is int64 ``[QUERIES]``, the queries' places in the batch; `wanted` are the queries
    of the tile that the batch has, and `target` the places of their results; `key_place` is int64
    ``[L]`` in the cache; `mask`, which is added to the scores, is ``[QUERIES, L]``.
    """

    query_place: Tensor
    wanted: slice
    target: slice
    key_place: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AlonePlan:
    """A plan of tiles in the order of the batch's queries."""

    shape: AttentionShape
    num_queries: int
    tiles: tuple[_Tile, ...]

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Compute attention; arguments and result are as in `paged_attention`, unchecked."""
        shape = self.shape
        out = torch.empty(query.shape, dtype=query.dtype)
        cache = kv_cache.view(-1, 2, shape.num_kv_heads, shape.head_dim)
        with in_one_thread():
            for tile in self.tiles:
                kv = cache.index_select(0, tile.key_place)
                own = query.index_select(0, tile.query_place)
                for head in range(shape.num_heads):
                    if head % shape.group_size == 0:
                        key, value = map(_alone, kv[:, :, head // shape.group_size].unbind(1))
                    result = functional.scaled_dot_product_attention(
                        _alone(own[:, head]), key, value, attn_mask=tile.mask, scale=scale
                    )
                    out[tile.target, head] = result[0, 0, tile.wanted]
        return out


def plan(sequences: PagedSequences, shape: AttentionShape, window: int | None) -> AlonePlan:
    """Prepare a step; arguments are as in `plan_paged_attention`, unchecked."""
    tiles: list[_Tile] = []
    masks: dict[int, Tensor] = {}
    first = 0
    rows = zip(
        sequences.query_len.tolist(),
        sequences.seq_len.tolist(),
        sequences.block_table,
        strict=True,
    )
    for query_len, seq_len, table in rows:
        start = seq_len - query_len
        for begin in range(start // QUERIES * QUERIES, seq_len, QUERIES):
            if begin not in masks:
                masks[begin] = _mask(begin, shape, window)
            tiles.append(
                _tile(
                    begin, start, seq_len, first, _places(begin, seq_len, table, shape, window),
                    masks[begin],
                )
            )  # fmt: skip
        first += query_len
    return AlonePlan(shape, first, tuple(tiles))


def _tile(
    begin: int, start: int, seq_len: int, first_query: int, key_place: Tensor, mask: Tensor
) -> _Tile:
    """Make the tile at position `begin` of a row with queries at positions `start` to `seq_len`."""
    position = np.clip(np.arange(begin, begin + QUERIES), start, seq_len - 1)
    own = slice(max(begin, start), min(begin + QUERIES, seq_len))
    return _Tile(
        query_place=torch.from_numpy(first_query + position - start),
        wanted=slice(own.start - begin, own.stop - begin),
        target=slice(first_query + own.start - start, first_query + own.stop - start),
        key_place=key_place,
        mask=mask,
    )


def _places(
    begin: int,
    seq_len: int,
    table: NDArray[np.int32],
    shape: AttentionShape,
    window: int | None,
) -> Tensor:
    """Return the cache positions of a tile's keys; keys past the sequence's end repeat its last."""
    position = np.minimum(_key_positions(begin, window), seq_len - 1)
    block = table[position // shape.block_size].astype(np.int64)
    return torch.from_numpy(block * shape.block_size + position % shape.block_size)


def _key_positions(begin: int, window: int | None) -> NDArray[np.int64]:
    oldest = 0 if window is None else max(0, begin - window + 1)
    return np.arange(oldest // KEYS * KEYS, -(-(begin + QUERIES) // KEYS) * KEYS)


def _mask(begin: int, shape: AttentionShape, window: int | None) -> Tensor:
    query_at = np.arange(begin, begin + QUERIES)[:, None]
    key_at = _key_positions(begin, window)
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    mask = torch.zeros(seen.shape, dtype=shape.dtype)
    mask.masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return mask


def _alone(head: Tensor) -> Tensor:
    """Return the numbers of one head, ``[N, D]``, at an address of its own: ``[1, 1, N, D]``."""
    return head.clone(memory_format=torch.contiguous_format)[None, None]
