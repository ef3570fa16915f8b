"""
rope_kv_write with one complex product and one scatter: neighbouring pairs are complex numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
    Rotate and store; arguments are as in the package's `rope_kv_write`, unchecked. Overwrites
    `qkv`.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = kv_cache.shape[3:]
    heads = qkv.view(num_tokens, -1, head_dim)
    query_key = heads[:, :-num_kv_heads]
    if qk_norm is not None:
        normed = functional.rms_norm(query_key, (head_dim,), None, norm_eps)
        torch.mul(normed, qk_norm, out=query_key)
    turn = torch.view_as_complex(rotation).unsqueeze(1)
    pairs = query_key.view(num_tokens, -1, head_dim // 2, 2)
    if qkv.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turn)
    else:
        turned = torch.view_as_complex(pairs.float()).mul_(turn)
        pairs.copy_(torch.view_as_real(turned))
    kv_width = 2 * num_kv_heads * head_dim
    # Tokens that are not to be stored are written to block 0: cheaper than to look for them.
    position = kv_position.clamp(min=0)
    kv_cache.view(-1, kv_width).index_copy_(0, position, qkv[:, -kv_width:])
    return query_key[:, :-num_kv_heads]
