"""
Paged attention of rows with one query each, in Triton: split over chunks of keys, merged in order.

Keys are read once for all query heads that share them. The number of programs that share a row
depends on the batch; a row's bits do not (`tuning.DecodeTuning`).

Source: split-KV decoding, Flash-Decoding (Dao et al., 2023). It cuts a row into as many parts as
the device has room for; here chunks depend on the row's length alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.early_launch import launch_options
from kernels.paged_attention.triton_decode_parts import (
    attend_chunk,
    chunks_of_row,
    empty_sums,
    mean,
    merge_sums,
)
from kernels.paged_attention.tuning import (
    HEADS_PER_PROGRAM,
    DecodeTuning,
    decode_splits,
    decode_tuning,
    padded_head_dim,
    programs_per_kv_head,
)
from kernels.triton_early import begin_early

_MERGED_AT_ONCE = 8
"""Number of chunks that a merging program loads at once."""


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """
    Results of chunks between the two launches: E = B * H * max_chunks entries, for B rows with H
    query heads. That of a chunk of a row and head is ``(row * H + head) * max_chunks + chunk``.

    Attributes:
        partial: float32 ``[E, D]``, sum of weighted values, not divided by the sum of weights.
        weight: float32 ``[E, 2]``, the largest score in base 2, and the sum of weights.
    """

    partial: Tensor
    weight: Tensor


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query: tl.tensor,
    kv_cache: tl.tensor,
    block_table: tl.tensor,
    seq_len: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    scale_log2: tl.float32,
    table_stride: tl.int64,
    QUERY_ROW_STRIDE: tl.constexpr,
    QUERY_HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """
    Attend to the chunks of one row, key head and split. Oracle: `reference.ReferencePlan.attend`.

    Grid (KV_HEADS * cdiv(GROUP, HEADS), splits, B). query [B, H, D]; kv_cache [blocks, BLOCK, 2,
    KV_HEADS, D]; seq_len 0 pads. DIRECT writes all of out [B, H, D], else chunks write to their
    DecodeScratch. Heads >= GROUP, columns >= D and unseen keys are masked. Offsets int64.
    """
    begin_early(EARLY)
    kv_head = tl.program_id(0) // tl.cdiv(GROUP, HEADS)
    in_group = tl.program_id(0) % tl.cdiv(GROUP, HEADS) * HEADS + tl.arange(0, HEADS)
    row, dim = tl.program_id(2).to(tl.int64), tl.arange(0, PADDED_D)
    head, length = kv_head * GROUP + in_group, tl.load(seq_len + row)
    real = (in_group[:, None] < GROUP) & (dim[None, :] < D)
    query_at = row * QUERY_ROW_STRIDE + head[:, None] * QUERY_HEAD_STRIDE + dim[None, :]
    own_query = tl.load(query + query_at, mask=real, other=0.0)  # [HEADS, PADDED_D]
    first, end, step, num_chunks = chunks_of_row(length, TILE, MIN_CHUNK, MAX_CHUNKS, WINDOW)
    per_split = tl.cdiv(num_chunks, tl.num_programs(1))
    begin = tl.program_id(1) * per_split
    sums = empty_sums(HEADS, PADDED_D)
    for chunk in range(begin, tl.minimum(begin + per_split, num_chunks)):
        part = attend_chunk(
            own_query, kv_cache + kv_head * D, block_table + row * table_stride, length,
            first + chunk * step, tl.minimum(first + (chunk + 1) * step, end), scale_log2,
            KV_HEADS, D, PADDED_D, HEADS, BLOCK, TILE, WINDOW,
        )  # fmt: skip
        if DIRECT:
            sums = merge_sums(sums, part)
        else:
            entry = (row * KV_HEADS * GROUP + head) * MAX_CHUNKS + chunk
            tl.store(weight + entry * 2, part[0], mask=in_group < GROUP)
            tl.store(weight + entry * 2 + 1, part[1], mask=in_group < GROUP)
            tl.store(partial + entry[:, None] * D + dim[None, :], part[2], mask=real)
    if DIRECT:
        entry = row * KV_HEADS * GROUP + head
        tl.store(out + entry[:, None] * D + dim[None, :], mean(sums, out), mask=real)


@triton.jit
def merge_kernel(
    partial: tl.tensor,
    weight: tl.tensor,
    seq_len: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """
    Merge the chunks of one row and query head, in the order and by the arithmetic of DIRECT.

    Grid (H, B). partial and weight fp32 as in DecodeScratch; seq_len [B] int32. Every element of
    out [B, H, D] is written, zeros where seq_len is 0. Chunks that the row lacks and columns >= D
    are masked. Offsets int64; fp32 sums, rounded once.
    Oracle: `reference.ReferencePlan.attend`.
    """
    begin_early(EARLY)
    row = tl.program_id(1).to(tl.int64)
    entry = row * tl.num_programs(0) + tl.program_id(0) + tl.arange(0, 1)
    dim = tl.arange(0, PADDED_D)
    real_dim = dim[None, :] < D
    length = tl.load(seq_len + row)
    _, _, _, num_chunks = chunks_of_row(length, TILE, MIN_CHUNK, MAX_CHUNKS, WINDOW)
    sums = empty_sums(1, PADDED_D)
    for start in range(0, num_chunks, AT_ONCE):
        for offset in tl.static_range(AT_ONCE):  # unrolled: these loads wait for nothing
            chunk = entry * MAX_CHUNKS + start + offset
            real = start + offset < num_chunks
            largest = tl.load(weight + chunk * 2, mask=real, other=float("-inf"))
            total = tl.load(weight + chunk * 2 + 1, mask=real, other=0.0)
            part_at = partial + chunk[:, None] * D + dim[None, :]
            part = tl.load(part_at, mask=real & real_dim, other=0.0)
            sums = merge_sums(sums, (largest, total, part))
    tl.store(out + entry[:, None] * D + dim[None, :], mean(sums, out), mask=real_dim)


def allocate_scratch(
    num_rows: int, num_heads: int, head_dim: int, tuning: DecodeTuning, device: torch.device
) -> DecodeScratch:
    """Allocate scratch for batches of up to `num_rows` rows."""
    entries = num_rows * num_heads * tuning.max_chunks
    return DecodeScratch(
        torch.empty((entries, head_dim), dtype=torch.float32, device=device),
        torch.empty((entries, 2), dtype=torch.float32, device=device),
    )


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    scratch: DecodeScratch | None = None,
    tuning: DecodeTuning | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """
    Compute attention with one query per row, at the row's last position; the keys and values of
    that position must be in the cache already.

    Grids depend on shapes only, and lengths are read on the device: a captured launch serves any
    lengths that fit the table.

    Args:
        query: Shape ``[B, H, D]``, last stride 1.
        kv_cache: Contiguous, shape ``[blocks, block_size, 2, K, D]``; type of `query`.
        block_table: int32 ``[B, M]``, last stride 1; entries past a row's length are ignored.
        seq_len: int32 ``[B]``, contiguous; 0 for rows of padding, with zeros as their result.
        scale: Factor of the scores.
        window: Number of last positions that the query sees, its own included; None for all.
        out: Contiguous ``[B, H, D]`` for the result; None makes one.
        scratch: Scratch of at least B rows; None makes one if it is needed.
        tuning: Tuning to use instead of the table's.
        num_splits: Programs per row and key head, instead of the table's; 1 needs no scratch.

    Returns:
        `out`.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    if tuning is None:
        tuning = decode_tuning(head_dim=head_dim, num_kv_heads=num_kv_heads, dtype=query.dtype)
    if num_splits is None:
        num_splits = decode_splits(
            tuning, num_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads
        )
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_splits == 1:
        scratch = DecodeScratch(out, out)  # placeholders that are not touched
    elif scratch is None:
        scratch = allocate_scratch(num_rows, num_heads, head_dim, tuning, query.device)
    rows = (block_table, seq_len)
    _launch(query, kv_cache, *rows, out, scratch, tuning, num_splits, scale, window or 0)
    return out


def _launch(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    tuning: DecodeTuning,
    num_splits: int,
    scale: float,
    window: int,
) -> None:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    same = {  # for both launches
        "D": head_dim,
        "PADDED_D": padded_head_dim(head_dim),
        "TILE": tuning.tile,
        "MIN_CHUNK": tuning.min_chunk,
        "MAX_CHUNKS": tuning.max_chunks,
        "WINDOW": window,
        "enable_fp_fusion": False,  # rounding must not depend on the compiler's choice
        **launch_options(),
    }
    programs = num_kv_heads * programs_per_kv_head(num_heads, num_kv_heads)
    decode_kernel[(programs, num_splits, num_rows)](
        query,
        kv_cache,
        block_table,
        seq_len,
        out,
        scratch.partial,
        scratch.weight,
        scale * math.log2(math.e),
        block_table.stride(0),
        QUERY_ROW_STRIDE=query.stride(0),
        QUERY_HEAD_STRIDE=query.stride(1),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEADS=HEADS_PER_PROGRAM,
        BLOCK=kv_cache.shape[1],
        DIRECT=num_splits == 1,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        **same,
    )
    if num_splits > 1:
        at_once = min(_MERGED_AT_ONCE, tuning.max_chunks)
        merge_kernel[(num_heads, num_rows)](
            scratch.partial, scratch.weight, seq_len, out, AT_ONCE=at_once, num_warps=2, **same
        )
