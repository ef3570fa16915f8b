"""
Attention over keys and values in place in the cache, for tiles with adjacent blocks.

A run of adjacent blocks is a view of the cache and needs no gathering. A tile of several runs is
computed run by run, and the results are merged by their log-sum-exp: out = sum(w_i * out_i) with
w = softmax(lse).

Each run is a call of its own, while gathered tiles share one, so it must be long. Time of decodes
relative to gathering all, one thread, float32, 1 to 32 sequences, by keys and values of each:

    MiB                 0.2       0.5       1.5       4      6           16
    one run             0.8-1.5   0.9-1.1   0.85      0.85   0.8         0.6
    two to four runs                        1.0-1.2   1.0    0.75-0.95   0.4-0.7

Chunks of prompts gain a tenth from one run and nothing from several; those of several runs are
gathered, and so are decodes of several runs with a window. Sequences of one length could share a
call if they lay at equal distances, which block allocation does not arrange.

Source: log-sum-exp merging of parts of a sequence as in FlashAttention-2 and Flash-Decoding (Dao
2023); there a sequence is split for parallelism, here the parts are runs that the allocator left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.paged_attention.sequences import AttentionShape, PagedSequences
from kernels.paged_attention.tiles import Tiles

LEAST_BYTES_OF_ONE = 1 << 20
"""Least bytes of keys and values of a tile of one run that pay for a call of its own."""

LEAST_BYTES_OF_SEVERAL = 6 << 20
"""Least bytes of keys and values of a tile of several runs that pay for the calls and merging."""

MOST_RUNS = 4
"""Most runs of a tile that is read in place."""


@dataclass(frozen=True, slots=True)
class InPlaceTile:
    """
    A tile of Q queries and L keys that are read in place.

    `queries` are the tile's among the plan's ordered ones; `runs` are cache positions; `mask` is as
    in a group of tiles, ``[1, 1, 1 or group_size * Q, L]``, or None, as always with several runs.
    """

    num_queries: int
    queries: slice
    runs: tuple[slice, ...]
    mask: Tensor | None

    @property
    def num_tiles(self) -> int:
        """Number of tiles: always one."""
        return 1

    def attend(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        """
        Compute attention.

        Args:
            query: Shape ``[1, K, group_size * Q, D]``.
            cache: Shape ``[positions, 2, K, D]``.
            scale: Factor of the scores.

        Returns:
            The shape of `query`.
        """
        if len(self.runs) == 1:
            key, value = _views(cache, self.runs[0])
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=self.mask, scale=scale
            )
        outs, log_sums = [], []
        for run in self.runs:
            out, log_sum = _attend_to_part(query, *_views(cache, run), scale=scale)
            outs.append(out)
            log_sums.append(log_sum)
        return merge(torch.stack(outs), torch.stack(log_sums)).to(query.dtype)


def merge(outs: Tensor, log_sums: Tensor) -> Tensor:
    """
    Merge attention over parts of the keys to attention over all.

    Args:
        outs: Result of each part, ``[P, ..., D]``.
        log_sums: Log-sum-exp of each part's scores, ``[P, ...]``, float32 and finite.

    Returns:
        Shape ``[..., D]``, float32.
    """
    return (log_sums.softmax(dim=0).unsqueeze(-1) * outs).sum(dim=0)


# The public function does not return the log-sum-exp, which merging needs.
_attend_to_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
"""Function that `scaled_dot_product_attention` calls on a CPU; also returns the log-sum-exp."""


def find_runs(
    tiles: Tiles, sequences: PagedSequences, shape: AttentionShape, window: int | None
) -> dict[int, tuple[slice, ...]]:
    """Return the tiles that are to be read in place, and their runs in order."""
    bytes_per_key = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    candidates = np.flatnonzero(tiles.num_keys * bytes_per_key >= LEAST_BYTES_OF_ONE)
    found = {}
    for tile in candidates.tolist():
        first = int(tiles.first_key[tile]) // shape.block_size
        num_keys = int(tiles.num_keys[tile])
        num_blocks = -(-num_keys // shape.block_size)
        table = sequences.block_table[tiles.row[tile], first : first + num_blocks]
        breaks = np.flatnonzero(table[1:] != table[:-1] + 1) + 1
        if len(breaks):
            is_decode = tiles.num_queries[tile] == 1 and window is None
            is_long = num_keys * bytes_per_key >= LEAST_BYTES_OF_SEVERAL
            if len(breaks) >= MOST_RUNS or not is_decode or not is_long:
                continue
        edges = [0, *breaks.tolist(), num_blocks]
        found[tile] = tuple(_runs(table, edges, num_keys, shape.block_size))
    return found


def _runs(
    table: NDArray[np.int32], edges: list[int], num_keys: int, block_size: int
) -> Iterator[slice]:
    """Yield the runs between neighbouring `edges` of a tile's part of its block table."""
    for begin, end in pairwise(edges):
        first = int(table[begin]) * block_size
        yield slice(first, first + min(end * block_size, num_keys) - begin * block_size)


def _views(cache: Tensor, run: slice) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a run as views, ``[1, K, L, D]`` each."""
    own = cache.narrow(0, run.start, run.stop - run.start)  # raises if that is not in the cache
    key, value = own.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    return key, value
