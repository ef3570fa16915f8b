"""What benchmarks compute with: numbers of no meaning in buffers laid out as a step's are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention import AttentionShape, PagedSequences

_DRAWN = 1 << 20
"""Numbers that are drawn; longer tensors repeat them: drawing takes longer than what is timed."""


def random_numbers(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """
    Normal numbers of a deviation of `scale`: zeros would spare a GPU power that real ones need.
    """
    drawn = torch.empty(max(1, min(_DRAWN, math.prod(shape))), dtype=torch.float32)
    drawn.normal_(0.0, scale, generator=torch.Generator().manual_seed(seed))
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    fill_repeating(out, drawn)
    return out


def fill_repeating(out: Tensor, numbers: Tensor) -> None:
    """Fill a contiguous tensor with `numbers`, ``[N]``, again and again."""
    flat, source = out.view(-1), numbers.to(out.device, out.dtype)
    whole = flat.numel() // len(source)
    flat[: whole * len(source)].view(whole, len(source)).copy_(source)
    flat[whole * len(source) :].copy_(source[: flat.numel() - whole * len(source)])


@dataclass(frozen=True, slots=True)
class PagedBuffers:
    """
    One layer's cache with rows in shuffled blocks, and queries.

    Attributes:
        shape: Heads and cache.
        sequences: The rows.
        query: ``[T, H, D]``.
        kv_cache: ``[blocks, block_size, 2, K, D]``.
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
    """Rows of `query_len` new positions, ``[R]``, among `seq_len`, ``[R]``; block 0 is nobody's."""
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
    """Rows' blocks one after another from `blocks`; unused entries name block 0."""
    table = np.zeros((len(held), int(held.max())), np.int32)
    first = np.cumsum(held) - held
    for row, (begin, count) in enumerate(zip(first.tolist(), held.tolist(), strict=True)):
        table[row, :count] = blocks[begin : begin + count]
    return table
