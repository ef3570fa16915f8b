"""Operands of benchmarks: random numbers in buffers that are laid out as those of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention import AttentionShape, PagedSequences

_DRAWN = 1 << 20
"""Numbers that are drawn; longer tensors repeat them: drawing takes longer than the timed work."""
_DRAWS = 8
"""Number of distinct seeds; higher ones start over, for the same reason."""


def random_numbers(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """
    Return normal numbers with standard deviation `scale`.

    Zeros would need less power on a GPU than real numbers do, and so run faster.
    """
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    fill_randomly(out, seed=seed, scale=scale)
    return out


def fill_randomly(out: Tensor, *, seed: int = 0, scale: float = 1.0) -> None:
    """Fill a contiguous tensor as `random_numbers` does."""
    flat = out.view(-1)
    count = min(_DRAWN, flat.numel())
    if not count:
        return
    source = (_drawn(count, seed % _DRAWS) * scale).to(out.device, out.dtype)
    whole = flat.numel() // count
    flat[: whole * count].view(whole, count).copy_(source)
    flat[whole * count :].copy_(source[: flat.numel() - whole * count])


@functools.lru_cache(maxsize=2 * _DRAWS)
def _drawn(count: int, seed: int) -> Tensor:
    return torch.empty(count).normal_(generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class PagedBuffers:
    """
    One layer's KV cache with rows in shuffled blocks, and their queries.

    Attributes:
        shape: Sizes of heads and cache.
        sequences: Lengths and block tables of the rows.
        query: Queries, shape ``[T, H, D]``.
        kv_cache: Keys and values, shape ``[blocks, block_size, 2, K, D]``.
    """

    shape: AttentionShape
    sequences: PagedSequences
    query: Tensor
    kv_cache: Tensor


def paged_buffers(
    shape: AttentionShape,
    query_len: Sequence[int],
    seq_len: Sequence[int],
    *,
    seed: int = 0,
) -> PagedBuffers:
    """
    Make rows with `query_len` new positions, ``[R]``, of `seq_len` in all, ``[R]``.

    Block 0 belongs to no row.
    """
    lengths = np.array(seq_len, np.int32)
    held = -(-lengths // shape.block_size)
    blocks = np.random.default_rng(seed).permutation(int(held.sum())).astype(np.int32) + 1
    cache_shape = (len(blocks) + 1, shape.block_size, 2, shape.num_kv_heads, shape.head_dim)
    queries = (sum(query_len), shape.num_heads, shape.head_dim)
    return PagedBuffers(
        shape,
        PagedSequences(
            query_len=np.array(query_len, np.int32),
            seq_len=lengths,
            block_table=_table(blocks, held),
        ),
        random_numbers(queries, shape.dtype, shape.device, seed=seed),
        random_numbers(cache_shape, shape.dtype, shape.device, seed=seed + 1),
    )


def _table(blocks: NDArray[np.int32], held: NDArray[np.integer]) -> NDArray[np.int32]:
    """Hand out `blocks` to the rows one after another; unused entries name block 0."""
    table = np.zeros((len(held), int(held.max())), np.int32)
    first = np.cumsum(held) - held
    for row, (begin, count) in enumerate(zip(first.tolist(), held.tolist(), strict=True)):
        table[row, :count] = blocks[begin : begin + count]
    return table
