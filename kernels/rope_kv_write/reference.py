"""The definition of rope_kv_write."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_kv_write(
    qkv: Tensor,
    rotation: Tensor,
    kv_position: Tensor,
    kv_cache: Tensor,
    *,
    qk_norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    """Rotate and store; arguments are as in the package's `rope_kv_write`, unchecked."""
    num_kv_heads, head_dim = kv_cache.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query_key, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if qk_norm is not None:
        wide = query_key.to(torch.float32)
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        query_key = (wide * torch.rsqrt(mean_square + norm_eps)).to(qkv.dtype) * qk_norm
    even, odd = query_key[..., 0::2].float(), query_key[..., 1::2].float()
    cosine, sine = rotation[:, None, :, 0], rotation[:, None, :, 1]
    rotated = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    rotated = rotated.flatten(-2).to(qkv.dtype)
    query, key = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    is_stored = kv_position >= 0
    stored = kv_position[is_stored]
    block, offset = stored // kv_cache.shape[1], stored % kv_cache.shape[1]
    kv_cache[block, offset, 0] = key[is_stored]
    kv_cache[block, offset, 1] = value[is_stored]
    return query
