"""Attention over the paged KV cache, and other implementations on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from kernels.paged_attention import AttentionShape, paged_attention, plan_paged_attention
from tandem_bench.device.case import TANDEM, Case
from tandem_bench.device.operands import PagedBuffers, paged_buffers, random_numbers
from tandem_bench.device.timing import Call
from tandem_bench.kernels import flashinfer_peer

DENSE = "torch-sdpa-dense"
"""PyTorch's fused attention on dense keys and values of equal lengths, without a block table."""


@dataclass(frozen=True, slots=True)
class Rows:
    """
    Rows of one batch.

    Attributes:
        text: Description in tables.
        query_len: New positions per row.
        seq_len: Positions per row.
    """

    text: str
    query_len: tuple[int, ...]
    seq_len: tuple[int, ...]

    @property
    def is_uniform(self) -> bool:
        """True where all rows have equal lengths, so that a dense tensor needs no padding."""
        return len(set(self.query_len)) == len(set(self.seq_len)) == 1

    @property
    def seen_pairs(self) -> int:
        """Number of (query, key) pairs that attend under the causal mask."""
        return sum(
            query * total - query * (query - 1) // 2
            for query, total in zip(self.query_len, self.seq_len, strict=True)
        )


def decode_rows(num_rows: int, context: int) -> Rows:
    """Make decode rows: one query each over `context` positions."""
    return Rows(f"B={num_rows} ctx={context}", (1,) * num_rows, (context,) * num_rows)


def ragged_rows(num_rows: int, context: int, seed: int = 0) -> Rows:
    """Make decode rows of random lengths: `context` positions on average, at most twice that."""
    drawn = np.random.default_rng(seed).integers(1, 2 * context, num_rows, endpoint=True)
    return Rows(f"B={num_rows} ctx=1..{2 * context}", (1,) * num_rows, tuple(drawn.tolist()))


def prompt_rows(num_rows: int, length: int, cached: int = 0) -> Rows:
    """Make prompt rows of `length` new positions after `cached` ones."""
    text = f"N={num_rows} len={length}" + (f" cached={cached}" if cached else "")
    return Rows(text, (length,) * num_rows, (length + cached,) * num_rows)


def attention_cases(
    operation: str, shape: AttentionShape, rows: Rows, *, with_peers: bool
) -> Iterator[Case]:
    """
    Yield our attention on a batch, then other implementations on the same.

    Args:
        operation: Name in tables.
        shape: Sizes of heads and cache, number type and device.
        rows: Rows of the batch.
        with_peers: Yield PyTorch's on dense keys too, for decodes and whole prompts of
            equal lengths, and FlashInfer's where it is installed and the device is a GPU.
    """
    heads = f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}"
    kv_width = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    ours = Case(
        operation=operation,
        shape=f"{rows.text} heads={heads}",
        implementation=TANDEM,
        num_bytes=sum(rows.seq_len) * kv_width,
        num_flop=4 * shape.num_heads * shape.head_dim * rows.seen_pairs,
        make=partial(_with_buffers, _paged, shape, rows),
    )
    yield ours
    if not with_peers:
        return
    if rows.is_uniform and rows.query_len[0] in {1, rows.seq_len[0]}:
        yield replace(ours, implementation=DENSE, make=partial(_dense, shape, rows))
    for name, make in flashinfer_peer.contestants(shape, is_decode=max(rows.query_len) == 1):
        yield replace(
            ours,
            implementation=name,
            make=partial(_with_buffers, make, shape, rows),
        )


def _with_buffers(
    make: Callable[[PagedBuffers], Call], shape: AttentionShape, rows: Rows, seed: int
) -> Call:
    return make(paged_buffers(shape, rows.query_len, rows.seq_len, seed=seed))


def _paged(buffers: PagedBuffers) -> Call:
    plan = plan_paged_attention(buffers.sequences, buffers.shape)
    scale = buffers.shape.head_dim**-0.5
    return lambda: paged_attention(buffers.query, buffers.kv_cache, plan, scale)


def _dense(shape: AttentionShape, rows: Rows, seed: int) -> Call:
    num_rows, query_len, seq_len = len(rows.query_len), rows.query_len[0], rows.seq_len[0]
    kv_shape = (num_rows, shape.num_kv_heads, seq_len, shape.head_dim)
    key, value = (
        random_numbers(kv_shape, shape.dtype, shape.device, seed=2 * seed + part)
        for part in range(2)
    )
    if query_len == 1:  # heads of a group attend alike: they stand in as queries
        packed = (num_rows, shape.num_kv_heads, shape.group_size, shape.head_dim)
        return _attend(packed, key, value, shape, seed, is_causal=False)
    wide = (num_rows, shape.num_heads, query_len, shape.head_dim)
    return _attend(wide, key, value, shape, seed, is_causal=True)


def _attend(
    query_shape: Sequence[int],
    key: torch.Tensor,
    value: torch.Tensor,
    shape: AttentionShape,
    seed: int,
    *,
    is_causal: bool,
) -> Call:
    query = random_numbers(query_shape, shape.dtype, shape.device, seed=seed)
    return lambda: functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=query.shape[1] != key.shape[1]
    )
