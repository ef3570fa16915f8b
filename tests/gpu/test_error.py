"""
Results in 16 bits, on the CPU's paths here and on a GPU's where there is one: at most twice as far from the exact ones as
those of the plain formulas in the same type.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.paged_attention import (
    AttentionShape,
    PagedSequences,
    paged_attention,
    plan_paged_attention,
    reference,
)
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rms_norm import reference as norm_reference
from kernels.rope_kv_write import reference as rope_reference
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import reference as gate_reference
from kernels.silu_mul import silu_mul
from tests.gpu.rounded import Error, numbers

EPS = 1e-5
HEADS = [(8, 2, 64), (8, 2, 128), (9, 3, 64), (4, 2, 80)]
"""Query heads, key heads, head size."""

ATTENTION = [
    *((heads, torch.bfloat16, (None,)) for heads in HEADS),
    (HEADS[1], torch.bfloat16, (50,)),
    (HEADS[0], torch.float16, (None, 50)),
]
"""Each compiles kernels of its own on a GPU, so not all combinations."""

TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

ROWS = {
    "decodes": [(1, 1), (1, 17), (1, 300), (1, 64)],
    "mixed": [(1, 33), (20, 20), (33, 90), (3, 40), (1, 129)],
}
"""New positions and all positions of each row; both grow with the device's scale."""


def plain_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """
    Attend by the formula in the tensors' own type: ``[Q, H, D]`` last positions of ``[L, K, D]``.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    key_at = torch.arange(len(key), device=key.device)
    query_at = key_at[len(key) - len(query) :, None]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def scattered(
    rows: list[tuple[int, int]], of: AttentionShape
) -> tuple[PagedSequences, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """
    Return rows in shuffled blocks: what attention takes, and queries, keys and values of each row.
    """
    generator = np.random.default_rng(0)
    held = [-(-seq_len // of.block_size) for _, seq_len in rows]
    blocks = generator.permutation(sum(held)) + 1
    table = np.zeros((len(rows), max(held)), np.int32)
    kv_shape = (of.num_kv_heads, of.head_dim)
    cache = torch.full((len(blocks) + 1, of.block_size, 2, *kv_shape), torch.nan, dtype=of.dtype)
    parts = []
    for row, (query_len, seq_len) in enumerate(rows):
        table[row, : held[row]], blocks = blocks[: held[row]], blocks[held[row] :]
        on_host = {"dtype": of.dtype, "device": torch.device("cpu")}
        query = numbers(query_len, of.num_heads, of.head_dim, seed=3 * row, spread=2.0, **on_host)
        key = numbers(seq_len, *kv_shape, seed=3 * row + 1, **on_host)
        value = numbers(seq_len, *kv_shape, seed=3 * row + 2, **on_host)
        at = torch.arange(seq_len)
        block = torch.from_numpy(table[row].astype(np.int64))[at // of.block_size]
        cache[block, at % of.block_size, 0] = key
        cache[block, at % of.block_size, 1] = value
        parts.append(tuple(each.to(of.device) for each in (query, key, value)))
    sequences = PagedSequences(
        query_len=np.array([query for query, _ in rows], np.int32),
        seq_len=np.array([total for _, total in rows], np.int32),
        block_table=table,
    )
    return sequences, torch.cat([query for query, _, _ in parts]), cache.to(of.device), parts


class TestAttention:
    @pytest.mark.parametrize("kind", ROWS)
    @pytest.mark.parametrize("case", ATTENTION, ids=str)
    def test_is_near_the_exact_result(self, case, kind, device, scale):
        """
        Attention over the cache, of decodes, prompts and chunks together, is at most twice as far off as the formula.
        """
        (num_heads, num_kv_heads, head_dim), dtype, windows = case
        of = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=16,
            dtype=dtype,
            device=device,
        )
        rows = [
            (query if query == 1 else scale * query, scale * total) for query, total in ROWS[kind]
        ]
        sequences, query, cache, parts = scattered(rows, of)
        for window in windows:
            plan = plan_paged_attention(sequences, of, window=window)
            found = paged_attention(query, cache, plan, head_dim**-0.5)
            definition = reference.plan(sequences, of, window)
            exact = definition.attend(query.float(), cache.float(), head_dim**-0.5)
            plain = torch.cat([plain_attention(*part, window) for part in parts])
            assert Error.of(found, exact).is_within(Error.of(plain, exact)), window


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


class TestRowByRow:
    @TYPES
    @pytest.mark.parametrize("width", [63, 576, 4096])
    def test_norm_is_near_the_exact_result(self, width, dtype, device, scale):
        """
        A normalisation, alone and after a residual addition, is at most twice as far off as the formula.
        """
        shape = (5 * scale, width)
        x = numbers(*shape, dtype=dtype, device=device, spread=3.0)
        residual = numbers(*shape, dtype=dtype, device=device, seed=1)
        weight = numbers(width, dtype=dtype, device=device, seed=2)
        exact = norm_reference.rms_norm(x.float(), weight.float(), EPS)
        found = rms_norm(x, weight, EPS)
        assert Error.of(found, exact).is_within(Error.of(plain_norm(x, weight), exact))
        exact = norm_reference.rms_norm(x.float() + residual.float(), weight.float(), EPS)
        plain = plain_norm(x + residual, weight)
        found = add_rms_norm(x, residual, weight, EPS)
        assert Error.of(found, exact).is_within(Error.of(plain, exact))

    @TYPES
    @pytest.mark.parametrize("width", [112, 1536])
    def test_gate_is_near_the_exact_result(self, width, dtype, device, scale):
        """
        A gate is at most twice as far off as the formula.
        """
        gate_up = numbers(5 * scale, 2 * width, dtype=dtype, device=device, spread=3.0)
        gate, up = gate_up.chunk(2, dim=1)
        plain = gate * gate.sigmoid() * up
        exact = gate_reference.silu_mul(gate_up.float())
        assert Error.of(silu_mul(gate_up), exact).is_within(Error.of(plain, exact))

    @TYPES
    @pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_rotation_is_near_the_exact_result(self, heads, normed, dtype, device, scale):
        """
        Rotated queries and stored keys are at most twice as far off as the formula, and values are stored as they are.
        """
        num_heads, num_kv_heads, dim = heads
        num_tokens = 6 * scale
        like = {"dtype": dtype, "device": device}
        qkv = numbers(num_tokens, (num_heads + 2 * num_kv_heads) * dim, **like)
        angle = numbers(num_tokens, dim // 2, dtype=torch.float32, device=device, spread=9.0)
        rotation = torch.stack((angle.cos(), angle.sin()), dim=-1)
        norm = numbers(num_heads + num_kv_heads, dim, seed=1, **like) if normed else None
        place = torch.arange(num_tokens, device=device) + 4
        cache = torch.zeros((num_tokens // 4 + 2, 4, 2, num_kv_heads, dim), **like)
        exact_cache = cache.float()
        exact = rope_reference.rope_kv_write(
            qkv.float(),
            rotation,
            place,
            exact_cache,
            qk_norm=None if norm is None else norm.float(),
            norm_eps=EPS,
        )
        plain_query, plain_key = plain_rotation(qkv, rotation, norm, num_kv_heads, dim)
        value = qkv.view(num_tokens, -1, dim)[:, -num_kv_heads:].clone()
        query = rope_kv_write(qkv, rotation, place, cache, qk_norm=norm, norm_eps=EPS)
        key, stored = (part.flatten(0, 1)[place] for part in cache.unbind(2))
        exact_key = exact_cache[:, :, 0].flatten(0, 1)[place]
        assert Error.of(query, exact).is_within(Error.of(plain_query, exact))
        assert Error.of(key, exact_key).is_within(Error.of(plain_key, exact_key))
        assert torch.equal(value, stored)


def plain_rotation(
    qkv: Tensor, rotation: Tensor, norm: Tensor | None, num_kv_heads: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated by the formula in the tensors' own type."""
    turned = qkv.view(len(qkv), -1, dim)[:, :-num_kv_heads]
    if norm is not None:
        turned = plain_norm(turned, norm)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    cosine, sine = (part[:, None].to(qkv.dtype) for part in rotation.unbind(-1))
    pairs = (even * cosine - odd * sine, even * sine + odd * cosine)
    rotated = torch.stack(pairs, dim=-1).flatten(-2)
    return rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
