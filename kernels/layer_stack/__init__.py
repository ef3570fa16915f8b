"""
All layers of a decoder over a step's rows in one call, with packed weights on the CPU.

A step of few rows streams every weight through the processor's caches, and then finds interpreter
and framework gone from them, at each of nine operations per layer. One call does not come back
before the last layer. Its bits are those of the operations one after another (`reference`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.layer_stack import cpu_extension
from kernels.layer_stack.weights import LayerWeights
from kernels.packed_linear import PackedWeight, can_pack
from kernels.paged_attention import AttentionPlan
from kernels.paged_attention.cpu_extension import ExtensionPlan

__all__ = ["LayerStack", "LayerWeights"]


class LayerStack:
    """Layers whose matrices are packed, prepared for calls; `takes` says which steps it runs."""

    def __init__(self, layers: Sequence[LayerWeights], *, norm_eps: float, scale: float) -> None:
        """
        Args:
            layers: All of one shape; kept.
            norm_eps: Of every norm.
            scale: Of attention's scores.

        Raises:
            TypeError: A matrix is not packed.
        """
        for layer in layers:
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                if not isinstance(matrix, PackedWeight):
                    raise TypeError(f"a matrix of shape {list(matrix.shape)} is not packed")
        self._layers = cpu_extension.Layers(layers)
        self._norm_eps = norm_eps
        self._scale = scale

    def takes(self, plans: Sequence[AttentionPlan]) -> bool:
        """Whether products and all of these plans run in C++."""
        return can_pack(torch.float32, torch.device("cpu")) and all(
            isinstance(plan, ExtensionPlan) and plan.rest is None for plan in plans
        )

    def run(
        self,
        hidden: Tensor,
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        *,
        rotation: Tensor,
        kv_position: Tensor,
    ) -> None:
        """
        Compute all layers and write keys and values; only where `takes` says so.

        Args:
            hidden: float32 ``[T, hidden_size]``, contiguous. Overwritten with the result.
            kv_layers: Per layer float32 ``[blocks, block_size, 2, num_kv_heads, head_dim]``.
            plans: Per layer, of T queries.
            rotation: float32 ``[T, head_dim / 2, 2]``, as in `rope_kv_write`.
            kv_position: int64 ``[T]``, as there.

        Raises:
            ValueError: Shapes, types or strides are not as described.
            IndexError: A position or block that the caches do not have; nothing has changed.
        """
        num_rows = hidden.shape[0]
        shapes = {tuple(cache.shape) for cache in kv_layers}
        num_layers = len(self._layers.native)
        if len({num_layers, len(kv_layers), len(plans)}) > 1 or len(shapes) != 1:
            raise ValueError(
                f"{num_layers} layers need as many plans and caches of one shape, got "
                f"{len(plans)} plans and {len(kv_layers)} caches of {len(shapes)} shapes"
            )
        tensors = (hidden, rotation, *kv_layers)
        if any(each.dtype != torch.float32 or not each.is_contiguous() for each in tensors):
            raise ValueError("hidden, rotation and caches must be contiguous float32")
        lengths = {num_rows, len(rotation), len(kv_position), *(plan.num_queries for plan in plans)}
        if len(lengths) > 1 or kv_position.dtype != torch.int64:
            raise ValueError(
                f"hidden, rotation, int64 kv_position and plans must be of as many tokens, got "
                f"{sorted(lengths)} and {kv_position.dtype}"
            )
        cpu_extension.run(
            self._layers,
            hidden,
            kv_layers,
            plans,
            rotation=rotation,
            kv_position=kv_position.contiguous(),
            norm_eps=self._norm_eps,
            scale=self._scale,
        )
