"""rope_kv_write in one pass: a program takes some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.early_launch import launch_options
from kernels.triton_early import begin_early

HEADS_PER_PROGRAM = 8
"""Heads per program: enough work for it, and few enough that one token spreads over the device."""

_LANES = 32
_THREAD_WIDTH = 8


def rope_kv_write(
    qkv: Tensor,
    rotation: Tensor,
    kv_position: Tensor,
    kv_cache: Tensor,
    *,
    qk_norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """
    Rotate and store; arguments are as in the package's `rope_kv_write`, unchecked. `qkv` is not
    changed, and the returned queries are contiguous.
    """
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_heads = width // head_dim - 2 * num_kv_heads
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    shape = (num_tokens, num_heads, head_dim)
    query = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        dim_tile, num_warps = launch_shape(head_dim)
        num_tiles = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM)
        _rope_kv_write_kernel[(num_tokens, num_tiles)](
            qkv,
            rotation.contiguous(),
            kv_position.contiguous(),
            qkv if qk_norm is None else qk_norm.contiguous(),
            query,
            kv_cache,
            norm_eps,
            ROW_STRIDE=qkv.stride(0) if num_tokens > 1 else width,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            DIM_TILE=dim_tile,
            HEAD_TILE=HEADS_PER_PROGRAM,
            NORMS=qk_norm is not None,
            num_warps=num_warps,
            **launch_options(),
        )
    return query


def launch_shape(head_dim: int) -> tuple[int, int]:
    """
    Return the columns of a tile and warps for heads of `head_dim`.

    They depend on nothing else: a token gives the same bits beside any other tokens.
    """
    dim_tile = triton.next_power_of_2(head_dim)
    num_warps = min(8, max(1, HEADS_PER_PROGRAM * dim_tile // (_LANES * _THREAD_WIDTH)))
    return dim_tile, num_warps


@triton.jit
def _rope_kv_write_kernel(
    qkv: tl.tensor,
    rotation: tl.tensor,
    kv_position: tl.tensor,
    qk_norm: tl.tensor,
    query: tl.tensor,
    kv_cache: tl.tensor,
    norm_eps: tl.float32,
    ROW_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """
    Write the rotated queries to query, the rotated keys and the values to kv_cache[kv_position[t]].

    Grid (T, cdiv(HEADS + 2 * KV_HEADS, HEAD_TILE)), HEAD_TILE heads of one token per program. qkv
    [T, (HEADS + 2 * KV_HEADS) * DIM] fp32|bf16|fp16, column stride 1: queries, keys, values;
    rotation [T, DIM / 2, 2] fp32; kv_position [T] int64, negative if the token is not stored;
    qk_norm [HEADS + KV_HEADS, DIM], read if NORMS; query [T, HEADS, DIM], all written; kv_cache
    [positions, 2, KV_HEADS, DIM]. DIM is even; columns >= DIM are masked. Offsets int64; fp32
    inside, rounded after the norm, after its weight and after the rotation.
    Oracle: `reference.rope_kv_write`.
    """
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    column = tl.arange(0, DIM_TILE)
    is_turned = head < HEADS + KV_HEADS
    inside = (head < HEADS + 2 * KV_HEADS) & (column < DIM)[None, :]
    place = head * DIM + column[None, :]
    plain = tl.load(qkv + token * ROW_STRIDE + place, mask=inside, other=0.0)
    values = plain
    if NORMS:
        wide = plain.to(tl.float32)
        mean_square = tl.sum(wide * wide, axis=1) / DIM
        normed = (wide * tl.rsqrt(mean_square + norm_eps)[:, None]).to(plain.dtype)
        factor = tl.load(qk_norm + place, mask=inside & is_turned, other=0.0)
        values = (normed.to(tl.float32) * factor.to(tl.float32)).to(plain.dtype)
    turn = tl.load(rotation + token * DIM + column, mask=column < DIM, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, (1, DIM_TILE // 2, 2)))
    even, odd = tl.split(tl.reshape(values.to(tl.float32), (HEAD_TILE, DIM_TILE // 2, 2)))
    pairs = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    turned = tl.reshape(pairs, (HEAD_TILE, DIM_TILE)).to(plain.dtype)
    result = tl.where(is_turned, turned, plain)
    tl.store(query + token * (HEADS * DIM) + place, result, mask=inside & (head < HEADS))
    position = tl.load(kv_position + token)
    stored = kv_cache + position * (2 * KV_HEADS * DIM) + (place - HEADS * DIM)
    tl.store(stored, result, mask=inside & (head >= HEADS) & (position >= 0))
