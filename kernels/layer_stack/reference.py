"""The definition of a stack of layers: its operations, one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from kernels.layer_stack.weights import LayerWeights
from kernels.packed_linear import PackedWeight, packed_linear
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul


def run(
    layers: Sequence[LayerWeights],
    hidden: Tensor,
    kv_layers: Sequence[Tensor],
    plans: Sequence[AttentionPlan],
    *,
    rotation: Tensor,
    kv_position: Tensor,
    norm_eps: float,
    scale: float,
    chunks: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Run all layers; arguments are as in `LayerStack`, unchecked."""
    for layer, kv_cache, plan in zip(layers, kv_layers, plans, strict=True):
        normed = rms_norm(hidden, layer.input_norm, norm_eps)
        qkv = _product(normed, layer.qkv, layer.qkv_bias)
        query = rope_kv_write(
            qkv, rotation, kv_position, kv_cache, qk_norm=layer.qk_norm, norm_eps=norm_eps
        )
        attended = paged_attention(query, kv_cache, plan, scale).flatten(1)
        num_chunks = chunks.get("output", 1)
        _product(attended, layer.output, layer.output_bias, hidden, num_chunks)
        normed = rms_norm(hidden, layer.mlp_norm, norm_eps)
        gate_up = _product(normed, layer.gate_up, layer.gate_up_bias)
        num_chunks = chunks.get("down", 1)
        _product(silu_mul(gate_up), layer.down, layer.down_bias, hidden, num_chunks)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    num_chunks: int = 1,
) -> Tensor:
    assert isinstance(weight, PackedWeight)
    return packed_linear(x, weight, bias, residual=residual, num_chunks=num_chunks)
