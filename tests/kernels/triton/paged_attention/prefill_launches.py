"""Calls of prefill attention as a model makes them, for compiling."""

from __future__ import annotations

import numpy as np
import torch

from kernels.paged_attention import AttentionShape, PagedSequences
from kernels.paged_attention.triton_prefill import prefill_attention
from kernels.paged_attention.triton_prefill_tiles import cut_prefill


def attention_shape(head_dim: int, block_size: int, dtype: str) -> AttentionShape:
    """Return the shape of a model in which 32 heads share 8 key heads."""
    return AttentionShape(
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        block_size=block_size,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
    )


def launch_prefill(
    *,
    head_dim: int,
    block_size: int,
    dtype: str,
    window: int | None,
    query_len: int,
    num_rows: int = 1,
) -> None:
    """
    Launch a batch of prompts of equal length in a cache that is not read, with queries within a
    wider tensor.
    """
    of = attention_shape(head_dim, block_size, dtype)
    sequences = PagedSequences(
        query_len=np.full(num_rows, query_len, np.int32),
        seq_len=np.full(num_rows, query_len, np.int32),
        block_table=np.zeros((num_rows, -(-query_len // block_size)), np.int32),
    )
    qkv = torch.empty((num_rows * query_len, 32 + 2 * 8, head_dim), dtype=of.dtype)
    query = qkv[:, :32]
    for size, tiles in cut_prefill(sequences, of, np.arange(num_rows)):
        prefill_attention(
            query,
            torch.empty((2, block_size, 2, 8, head_dim), dtype=of.dtype),
            torch.from_numpy(sequences.block_table),
            torch.from_numpy(tiles),
            size,
            scale=0.125,
            window=window,
            out=torch.empty(query.shape, dtype=of.dtype),
        )
