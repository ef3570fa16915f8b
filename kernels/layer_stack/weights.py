"""The weights of one decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.packed_linear import PackedWeight

MATRICES = ("qkv", "output", "gate_up", "down")
"""The attributes of `LayerWeights` that are weights of products, in the order of their use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """
    Weights of one decoder layer; matrices are ``[out, in]``, or a `PackedWeight` each.

    `qkv` stacks all query heads, then key heads, then value heads. Inside each query and key head
    the features of a rotary pair, stored `head_dim / 2` apart in the file, are neighbours here:
    attention scores do not depend on the order, and each rotation becomes a complex product.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes that all layers of a stack share; `query` and `key` are of all heads together."""

    hidden: int
    query: int
    key: int
    inner: int

    def width(self, name: str) -> int:
        """Return the number of elements of a row that one of `MATRICES` multiplies."""
        return {"output": self.query, "down": self.inner}.get(name, self.hidden)


def packed_sizes(layers: Sequence[LayerWeights]) -> LayerSizes:
    """
    Return the sizes of layers with packed matrices.

    Raises:
        TypeError: A matrix is not packed.
        ValueError: There are no layers, the type is not float32 or bfloat16, or a weight is not
            contiguous or not of the type and shape that fit the first layer's.
    """
    if not layers:
        raise ValueError("a stack needs a layer at least")
    for layer in layers:
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
            if not isinstance(matrix, PackedWeight):
                raise TypeError(f"a matrix of shape {list(matrix.shape)} is not packed")
    query, inner = _shape(layers[0].output)[1], _shape(layers[0].down)[1]
    qkv, hidden = _shape(layers[0].qkv)
    sizes = LayerSizes(hidden=hidden, query=query, key=(qkv - query) // 2, inner=inner)
    dtype = layers[0].input_norm.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"layers must be float32 or bfloat16, not {dtype}")
    for index, layer in enumerate(layers):
        _check(layer, index, sizes, dtype)
    return sizes


def _check(layer: LayerWeights, index: int, sizes: LayerSizes, dtype: torch.dtype) -> None:
    hidden, query, inner, qkv = sizes.hidden, sizes.query, sizes.inner, sizes.query + 2 * sizes.key
    expected = {
        "input_norm": (hidden,),
        "qkv": (qkv, hidden),
        "qkv_bias": (qkv,),
        "output": (hidden, query),
        "output_bias": (hidden,),
        "mlp_norm": (hidden,),
        "gate_up": (2 * inner, hidden),
        "gate_up_bias": (2 * inner,),
        "down": (hidden, inner),
        "down_bias": (hidden,),
    }
    optional = {"qkv_bias", "output_bias", "gate_up_bias", "down_bias"}
    for name, shape in expected.items():
        weight: Tensor | None = getattr(layer, name)
        if weight is None and name in optional:
            continue
        if weight is None or _shape(weight) != shape or not _is_plain(weight, dtype):
            found = None if weight is None else (weight.dtype, list(_shape(weight)))
            raise ValueError(
                f"{name} of layer {index} must be contiguous {dtype} of shape {list(shape)}, got "
                f"{found}"
            )
    norm = layer.qk_norm
    if norm is not None and (norm.numel() != query + sizes.key or not _is_plain(norm, dtype)):
        raise ValueError(
            f"qk_norm of layer {index} must be contiguous {dtype} of {query + sizes.key} elements, "
            f"got {norm.dtype} {list(norm.shape)}"
        )


def _shape(weight: Tensor) -> tuple[int, ...]:
    """Return a weight's shape, ``[out, in]`` of a packed matrix."""
    if isinstance(weight, PackedWeight):
        return weight.num_columns, weight.width
    return tuple(weight.shape)


def _is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.is_contiguous() and (weight.dtype == dtype or isinstance(weight, PackedWeight))
