"""Calls of decode attention as a model makes them, for compiling."""

from __future__ import annotations

import torch

from kernels.paged_attention.triton_decode import decode_attention


def launch_decode(
    *,
    head_dim: int,
    block_size: int,
    dtype: str,
    group_size: int = 4,
    window: int | None = None,
    num_splits: int = 2,
) -> None:
    """Launch a batch of 2 rows of 2 key heads, in blocks of a cache that is not read."""
    kind = getattr(torch, dtype)
    decode_attention(
        torch.empty((2, 2 * group_size, head_dim), dtype=kind),
        torch.empty((2, block_size, 2, 2, head_dim), dtype=kind),
        torch.empty((2, 3), dtype=torch.int32),
        torch.empty(2, dtype=torch.int32),
        scale=0.125,
        window=window,
        num_splits=num_splits,
    )
