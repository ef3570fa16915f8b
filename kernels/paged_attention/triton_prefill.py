"""
Attention of prompts' chunks over the paged cache, in Triton: the rows of a tile are queries of one
sequence under all heads that share a key head, and pass over the sequence's keys together.

Source: FlashAttention-2 (arXiv:2307.08691) for the order of work, with the heads of a group packed
into rows; keys come from the cache only, so that fresh prompts, cached prefixes and chunks are one
case.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.triton_prefill_tiles import TILE_FIELDS, TileSize
from kernels.paged_attention.tuning import padded_head_dim

_LOWEST = tl.constexpr(-1.0e38)
"""Initial value of maxima: finite, so that keys which a query does not see make no NaN."""


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    size: TileSize,
    *,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """
    Compute attention for all queries of some tiles; only their outputs are written.

    The grid depends on shapes only; the tensors' contents are read when it runs.

    Args:
        query: Shape ``[T, H, D]``, last stride 1.
        kv_cache: Contiguous, shape ``[blocks, block_size, 2, K, D]``, keys before values; type of
            `query`.
        block_table: int32 ``[R, M]``, last stride 1; entries that no tile's queries see may be any.
        tiles: int32 ``[N, 4]``, contiguous: row of the table, first query among T, its position in
            its sequence, number of queries, at most ``size.rows // (H // K)``. A tile without
            queries does nothing; if all its positions are negative, its outputs are zeros.
        size: Size of tiles, as `tile_size` chooses it.
        scale: Factor of the scores; positive.
        window: Number of last positions that a query sees, its own included; None for all.
        out: Contiguous, shape and type of `query`.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, _, num_kv_heads, _ = kv_cache.shape[1:]
    num_programs = tiles.shape[0] * num_kv_heads
    if not num_programs:
        return
    prefill_kernel[(num_programs,)](
        query,
        kv_cache,
        block_table,
        tiles,
        out,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        ROWS=size.rows,
        KEYS=size.keys,
        TILE_FIELDS=TILE_FIELDS,
        num_warps=size.num_warps,
        num_stages=size.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query: tl.tensor,
    kv_cache: tl.tensor,
    block_table: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    qk_scale: tl.float32,
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
) -> None:
    """
    Attend for one tile under one key head.

    Grid (N * KV_HEADS,). Row m of a tile is its query m // GROUP under head m % GROUP of the group;
    queries past the tile's are masked. Shapes as in prefill_attention, D <= HEAD_DIM_PADDED; WINDOW
    0 is none, qk_scale holds log2(e). Offsets int64; products in the tensors' type with fp32 sums,
    softmax in fp32 base 2.
    Oracle: `reference.ReferencePlan.attend`.
    """
    tile = tiles + tl.program_id(0) // KV_HEADS * TILE_FIELDS
    kv_head = tl.program_id(0) % KV_HEADS
    num_queries = tl.load(tile + 3)
    if num_queries == 0:
        return
    table = block_table + tl.load(tile).to(tl.int64) * table_stride
    position = tl.load(tile + 2)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    in_tile = row // GROUP
    held = (in_tile < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    which = tl.load(tile + 1).to(tl.int64) + in_tile
    head = kv_head * GROUP + row % GROUP
    at = which * query_stride + head * head_stride.to(tl.int64)
    own = tl.load(query + at[:, None] + dim[None, :], mask=held, other=0.0)
    weighted = _attend(
        own, position + in_tile, position, num_queries,
        kv_cache + kv_head * HEAD_DIM, table, qk_scale,
        2 * KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS,
    )  # fmt: skip
    at = (which * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + at[:, None] + dim[None, :], weighted.to(own.dtype), mask=held)


@triton.jit
def _attend(
    own: tl.tensor,
    query_at: tl.tensor,
    position: tl.tensor,
    num_queries: tl.tensor,
    head_cache: tl.tensor,
    table: tl.tensor,
    qk_scale: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """
    Return the outputs of rows own [ROWS, D] at positions query_at [ROWS], fp32 [ROWS, D].

    Keys are taken in three ranges; each bound but the last is a multiple of KEYS:
    [begin, whole)         some queries see them, for the window; empty without one
    [whole, diagonal)      every query sees them, so nothing is masked
    [diagonal, num_keys)   some queries see them, for causality
    """
    num_keys = tl.maximum(position + num_queries, 0)
    oldest = num_keys * 0
    begin = num_keys * 0
    whole = num_keys * 0
    state = (
        tl.zeros(own.shape, tl.float32),
        tl.zeros([own.shape[0]], tl.float32),
        tl.full([own.shape[0]], _LOWEST, tl.float32),
    )
    if WINDOW > 0:
        oldest = tl.maximum(position - (WINDOW - 1), 0)
        begin = oldest // KEYS * KEYS
        whole = tl.cdiv(tl.minimum(tl.maximum(num_keys - WINDOW, 0), num_keys), KEYS) * KEYS
        state = _attend_keys(
            state, own, query_at, begin, whole, oldest, num_keys, head_cache, table, qk_scale,
            TOKEN_STRIDE, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, True,
        )  # fmt: skip
    diagonal = tl.maximum((position + 1) // KEYS * KEYS, whole)
    state = _attend_keys(
        state, own, query_at, whole, diagonal, oldest, num_keys, head_cache, table, qk_scale,
        TOKEN_STRIDE, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, False,
    )  # fmt: skip
    state = _attend_keys(
        state, own, query_at, diagonal, num_keys, oldest, num_keys, head_cache, table, qk_scale,
        TOKEN_STRIDE, HEAD_DIM, BLOCK_SIZE, WINDOW, KEYS, True,
    )  # fmt: skip
    weighted, total, _ = state
    return weighted / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _attend_keys(
    state: tl.tuple,
    own: tl.tensor,
    query_at: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    oldest: tl.tensor,
    num_keys: tl.tensor,
    head_cache: tl.tensor,
    table: tl.tensor,
    qk_scale: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """
    Add the keys [begin, end) to the online softmax `state`.

    MASKED: some of them are hidden from some queries, or lie outside [oldest, num_keys), where the
    cache may hold NaN; the latter are never read.
    """
    weighted, total, highest = state
    dim = tl.arange(0, own.shape[1])
    for start in range(begin, end, KEYS):
        key_at = start + tl.arange(0, KEYS)
        is_held = (key_at >= oldest) & (key_at < num_keys)
        place = _places(table, start, is_held, BLOCK_SIZE, KEYS, MASKED)
        source = head_cache + place[:, None] * TOKEN_STRIDE + dim[None, :]
        mask = (dim < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & is_held[:, None]
        key = tl.load(source, mask=mask, other=0.0)
        value = tl.load(source + TOKEN_STRIDE // 2, mask=mask, other=0.0)
        scores = tl.dot(own, key.T, input_precision="ieee")  # [ROWS, KEYS]
        if MASKED:
            seen = key_at[None, :] <= query_at[:, None]
            if WINDOW > 0:
                seen = seen & (key_at[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1) * qk_scale)
        weights = tl.exp2(scores * qk_scale - risen[:, None])
        decay = tl.exp2(highest - risen)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None]
        weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")
        highest = risen
    return weighted, total, highest


@triton.jit
def _places(
    table: tl.tensor,
    start: tl.tensor,
    is_held: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return the cache positions of keys from `start` on, int64 [KEYS]; in block 0 if not held."""
    lane = tl.arange(0, KEYS)
    if BLOCK_SIZE % KEYS == 0:  # one block holds them all
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + (start % BLOCK_SIZE + lane)
    key_at = start + lane
    if MASKED:
        block = tl.load(table + key_at // BLOCK_SIZE, mask=is_held, other=0).to(tl.int64)
    else:
        block = tl.load(table + key_at // BLOCK_SIZE).to(tl.int64)
    return block * BLOCK_SIZE + key_at % BLOCK_SIZE
