"""
Paged attention on the CPU: per group of tiles one gather into a buffer that stays in cache, then
one fused call; long tiles with adjacent blocks are read in place (`cpu_runs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.paged_attention import cpu_alone
from kernels.paged_attention.cpu_runs import InPlaceTile, find_runs
from kernels.paged_attention.sequences import AttentionPlan, AttentionShape, PagedSequences
from kernels.paged_attention.tiles import (
    IntColumn,
    Tiles,
    cut_tiles,
    group_tiles,
    key_places,
    query_places,
    visible,
)

_GATHER_BYTES = 2 << 20
"""Bytes of keys and values gathered at a time: enough to pay for the calls, but still in cache."""


@dataclass(frozen=True, slots=True)
class _Group:
    """
    A group of B tiles with Q queries and L keys each, after padding.

    `queries` are the group's B * Q queries among the plan's ordered ones; `key_place` is int64
    ``[B * L]``; `mask`, which is added to scores, is ``[B, 1, 1 or group_size * Q, L]`` or None.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    queries: slice
    key_place: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """
    A plan of groups of tiles, and the places of their queries among the batch's.

    `query_order` is int64 ``[sum of B * Q]``, `result_order` int64 ``[T]`` its inverse; both are
    None if the groups take the batch's queries in order. `gathered` is scratch for the largest
    group's keys and values, ``[B * L, 2 * K * D]``.
    """

    shape: AttentionShape
    num_queries: int
    groups: tuple[_Group | InPlaceTile, ...]
    query_order: Tensor | None
    result_order: Tensor | None
    gathered: Tensor

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Compute attention; arguments and result are as in `paged_attention`, unchecked."""
        shape = self.shape
        heads = (shape.num_kv_heads, shape.group_size, shape.head_dim)
        ordered = query if self.query_order is None else query.index_select(0, self.query_order)
        ordered = ordered.view(-1, *heads)
        out = torch.empty(ordered.shape, dtype=query.dtype)
        cache = kv_cache.view(-1, 2, shape.num_kv_heads, shape.head_dim)
        for group in self.groups:
            own, target = ordered[group.queries], out[group.queries]
            if group.num_queries > 1:  # heads of a group share keys: they become queries
                tiled = (group.num_tiles, group.num_queries, *heads)
                own = own.view(tiled).permute(0, 2, 3, 1, 4).flatten(2, 3)
                target = target.view(tiled).permute(0, 2, 3, 1, 4)
            if isinstance(group, InPlaceTile):
                result = group.attend(own, cache, scale)
            else:
                key, value = self._gather(group, cache)
                result = functional.scaled_dot_product_attention(
                    own, key, value, attn_mask=group.mask, scale=scale
                )
            target.copy_(result.reshape(target.shape))
        out = out.view(-1, shape.num_heads, shape.head_dim)
        return out if self.result_order is None else out.index_select(0, self.result_order)

    def _gather(self, group: _Group, cache: Tensor) -> tuple[Tensor, ...]:
        """Gather the keys and values of a group, ``[B, K, L, D]`` each."""
        kv = self.gathered[: group.num_tiles * group.num_keys]
        torch.index_select(cache.flatten(1), 0, group.key_place, out=kv)
        kv = kv.view(group.num_tiles, group.num_keys, 2, -1, self.shape.head_dim)
        return kv.permute(2, 0, 3, 1, 4).unbind(0)


def plan(sequences: PagedSequences, shape: AttentionShape, window: int | None) -> AttentionPlan:
    """Prepare a step; arguments are as in `plan_paged_attention`, unchecked."""
    if shape.batch_invariant:
        return cpu_alone.plan(sequences, shape, window)
    num_queries = int(sequences.query_len.sum())
    kv_width = 2 * shape.num_kv_heads * shape.head_dim
    keys_per_group = max(1, _GATHER_BYTES // (kv_width * shape.dtype.itemsize))
    tiles = cut_tiles(sequences, window, shape.block_size)
    groups: list[_Group | InPlaceTile] = []
    orders = []
    num_ordered = most_keys = 0
    in_place = find_runs(tiles, sequences, shape, window)
    for index, runs in in_place.items():
        tile = tiles.select(slice(index, index + 1))
        orders.append(query_places(tile))
        own = slice(num_ordered, num_ordered + len(orders[-1]))
        groups.append(InPlaceTile(len(orders[-1]), own, runs, _mask(tile, shape, window)))
        num_ordered = own.stop
    if in_place:
        tiles = tiles.select(np.delete(np.arange(len(tiles)), list(in_place)))
    for tile_group in group_tiles(tiles, keys_per_group):
        group = _group(tile_group, num_ordered, sequences, shape, window)
        groups.append(group)
        orders.append(query_places(tile_group))
        num_ordered = group.queries.stop
        most_keys = max(most_keys, group.num_tiles * group.num_keys)
    query_order, result_order = _orders(orders, num_queries)
    return TiledPlan(
        shape,
        num_queries,
        tuple(groups),
        query_order,
        result_order,
        torch.empty((most_keys, kv_width), dtype=shape.dtype),
    )


def _group(
    tiles: Tiles,
    first: int,
    sequences: PagedSequences,
    shape: AttentionShape,
    window: int | None,
) -> _Group:
    num_queries = int(tiles.num_queries.max())
    places = key_places(tiles, sequences.block_table, shape.block_size)
    return _Group(
        num_tiles=len(tiles),
        num_queries=num_queries,
        num_keys=len(places) // len(tiles),
        queries=slice(first, first + len(tiles) * num_queries),
        key_place=torch.from_numpy(places),
        mask=_mask(tiles, shape, window),
    )


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
