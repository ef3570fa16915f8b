"""
Paged attention on the CPU: per group of tiles one gather into a buffer that stays in cache, then
one fused call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.paged_attention.sequences import AttentionShape, PagedSequences
from kernels.paged_attention.tiles import (
    IntColumn,
    Tiles,
    cut_tiles,
    group_tiles,
    key_places,
    query_places,
    visible,
)

_GATHER_BYTES = 1 << 20
"""Keys and values gathered at a time: about half of a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class _Group:
    """
    B tiles of Q queries and L keys after padding.

    `key_place` is int64 ``[B * L]``; `mask` is added to scores, ``[B, 1, 1 or group_size * Q, L]``,
    or None.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    key_place: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """
    Groups in order, and where their queries lie among the batch's.

    `query_order` is int64 ``[sum of B * Q]``, `result_order` int64 ``[T]`` its inverse; both None
    where the groups take the batch's queries as they stand.
    """

    shape: AttentionShape
    num_queries: int
    groups: tuple[_Group, ...]
    query_order: Tensor | None
    result_order: Tensor | None

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Arguments and result as in `paged_attention`, unchecked."""
        kv_heads, group_size, head_dim = (
            self.shape.num_kv_heads,
            self.shape.group_size,
            self.shape.head_dim,
        )
        ordered = query if self.query_order is None else query.index_select(0, self.query_order)
        ordered = ordered.view(-1, kv_heads, group_size, head_dim)
        out = torch.empty(ordered.shape, dtype=query.dtype)
        cache = kv_cache.view(-1, 2 * kv_heads * head_dim)
        most = max((len(group.key_place) for group in self.groups), default=0)
        gathered = torch.empty((most, cache.shape[1]), dtype=query.dtype)
        first = 0
        for group in self.groups:
            kv = gathered[: len(group.key_place)]
            torch.index_select(cache, 0, group.key_place, out=kv)
            kv = kv.view(group.num_tiles, group.num_keys, 2, kv_heads, head_dim)
            own = slice(first, first + group.num_tiles * group.num_queries)
            tiled = (group.num_tiles, group.num_queries, kv_heads, group_size, head_dim)
            result = functional.scaled_dot_product_attention(
                ordered[own].view(tiled).permute(0, 2, 3, 1, 4).flatten(2, 3),
                kv[:, :, 0].transpose(1, 2),
                kv[:, :, 1].transpose(1, 2),
                attn_mask=group.mask,
                scale=scale,
            )
            result = result.reshape(group.num_tiles, kv_heads, group_size, -1, head_dim)
            out[own].view(tiled).copy_(result.permute(0, 3, 1, 2, 4))
            first = own.stop
        out = out.flatten(1, 2)
        return out if self.result_order is None else out.index_select(0, self.result_order)


def plan(sequences: PagedSequences, shape: AttentionShape, window: int | None) -> TiledPlan:
    """Arguments as in `plan_paged_attention`, unchecked."""
    num_queries = int(sequences.query_len.sum())
    row_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    tiles = cut_tiles(sequences, window, shape.block_size)
    groups, orders = [], []
    for group in group_tiles(tiles, max(1, _GATHER_BYTES // row_bytes)):
        places = key_places(group, sequences.block_table, shape.block_size)
        groups.append(
            _Group(
                num_tiles=len(group),
                num_queries=int(group.num_queries.max()),
                num_keys=int(group.num_keys.max()),
                key_place=torch.from_numpy(places),
                mask=_mask(group, shape, window),
            )
        )
        orders.append(query_places(group))
    query_order, result_order = _orders(orders, num_queries)
    return TiledPlan(shape, num_queries, tuple(groups), query_order, result_order)


def _mask(group: Tiles, shape: AttentionShape, window: int | None) -> Tensor | None:
    seen = visible(group, window)
    if seen is None:
        return None
    mask = torch.zeros(seen.shape, dtype=shape.dtype)
    mask.masked_fill_(torch.from_numpy(~seen), float("-inf"))
    if mask.shape[1] > 1 and shape.group_size > 1:
        mask = mask.repeat(1, shape.group_size, 1)
    return mask.unsqueeze(1)


def _orders(orders: list[IntColumn], num_queries: int) -> tuple[Tensor | None, Tensor | None]:
    order = np.concatenate(orders) if orders else np.empty(0, np.int64)
    if len(order) == num_queries and (order == np.arange(num_queries)).all():
        return None, None
    inverse = np.empty(num_queries, np.int64)
    inverse[order] = np.arange(len(order))
    return torch.from_numpy(order), torch.from_numpy(inverse)
