"""The weights of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """
    One decoder layer; matrices are ``[out, in]``, or a `PackedWeight` each.

    `qkv` stacks all query heads, then key heads, then value heads. Inside each query and key head
    the features of a rotary pair, stored `head_dim / 2` apart in the file, are neighbours here:
    attention scores do not depend on the order, and a rotation becomes one complex product.
    `qk_norm` is ``[num_heads + num_kv_heads, head_dim]`` in the same order.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
