"""
All layers of a decoder over a step's rows in one call, with packed weights on the CPU.

A step of few rows streams every weight through the processor's caches, which evicts interpreter and
framework from them before each of nine operations per layer. One call computes all layers without
returning to them. Its bits are those of the operations one after another (`reference`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.layer_stack import cpu_extension
from kernels.layer_stack.weights import MATRICES, LayerWeights, packed_sizes
from kernels.packed_linear import can_pack, check_even_chunks
from kernels.paged_attention import AttentionPlan
from kernels.paged_attention.cpu_extension import ExtensionPlan

__all__ = ["MATRICES", "LayerStack", "LayerWeights"]


class LayerStack:
    """Layers with packed matrices, prepared for calls; `takes` tells which steps it can run."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        *,
        norm_eps: float,
        scale: float,
        chunks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            layers: Weights of layers of one shape, which are kept alive.
            norm_eps: Epsilon of every norm.
            scale: Scale of attention scores.
            chunks: By name of a matrix, the chunks of its sums if they are several, as in
                `packed_linear`.

        Raises:
            TypeError: A matrix is not packed.
            ValueError: There are no layers, or a weight's type or shape does not fit the first
                layer's, or a number of chunks its width.
        """
        self._dtype = layers[0].input_norm.dtype if layers else torch.float32
        sizes = packed_sizes(layers)
        for name, num_chunks in chunks.items():
            check_even_chunks(num_chunks, sizes.width(name))
        self._layers = cpu_extension.Layers(layers, sizes, chunks)
        self._norm_eps = norm_eps
        self._scale = scale

    def takes(self, plans: Sequence[AttentionPlan]) -> bool:
        """Tell whether products and all of these plans run in C++."""
        return can_pack(self._dtype, torch.device("cpu")) and all(
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
        Compute all layers and write keys and values; `takes` must be true of the plans.

        Args:
            hidden: ``[T, hidden_size]`` in the layers' type, contiguous. Overwritten with the
                result.
            kv_layers: KV cache per layer, ``[blocks, block_size, 2, num_kv_heads, head_dim]`` of
                that type.
            plans: Attention plan per layer, of T queries.
            rotation: float32 ``[T, head_dim / 2, 2]``, as in `rope_kv_write`.
            kv_position: int64 ``[T]``, as in `rope_kv_write`.

        Raises:
            ValueError: Shapes, types or strides are not as described, or not those of the layers.
            IndexError: The caches do not have a position or block; nothing has changed.
        """
        shapes = {tuple(cache.shape) for cache in kv_layers}
        num_layers = len(self._layers.native)
        if len({num_layers, len(kv_layers), len(plans)}) > 1 or len(shapes) != 1:
            raise ValueError(
                f"{num_layers} layers need as many plans and caches of one shape, got "
                f"{len(plans)} plans and {len(kv_layers)} caches of {len(shapes)} shapes"
            )
        dtype, own = self._dtype, (hidden, *kv_layers)
        if any(each.dtype != dtype or not each.is_contiguous() for each in own):
            raise ValueError(f"hidden and caches must be contiguous {dtype}, as the layers are")
        if rotation.dtype != torch.float32 or not rotation.is_contiguous():
            raise ValueError(f"rotation must be contiguous float32, got {rotation.dtype}")
        lengths = {
            len(hidden),
            len(rotation),
            len(kv_position),
            *(plan.num_queries for plan in plans),
        }
        if len(lengths) > 1 or kv_position.dtype != torch.int64:
            raise ValueError(
                f"hidden, rotation, int64 kv_position and plans must be of as many tokens, got "
                f"{sorted(lengths)} and {kv_position.dtype}"
            )
        self._check_shapes(hidden, kv_layers[0], plans, rotation)
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

    def _check_shapes(
        self, hidden: Tensor, kv_cache: Tensor, plans: Sequence[AttentionPlan], rotation: Tensor
    ) -> None:
        """Check that tensors and plans have the layers' sizes; raise ValueError otherwise."""
        sizes, num_rows = self._layers.sizes, len(hidden)
        for plan in {id(plan): plan for plan in plans}.values():
            shape = plan.shape
            expected = (shape.block_size, 2, shape.num_kv_heads, shape.head_dim)
            heads = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
            if shape.dtype != self._dtype or heads != (sizes.query, sizes.key):
                raise ValueError(f"layers of {sizes} cannot attend as planned for {shape}")
            if kv_cache.shape[1:] != expected:
                raise ValueError(
                    f"caches must have shape [blocks, {', '.join(map(str, expected))}], got "
                    f"{list(kv_cache.shape)}"
                )
        turns = (num_rows, kv_cache.shape[-1] // 2, 2)
        if hidden.shape != (num_rows, sizes.hidden) or rotation.shape != turns:
            raise ValueError(
                f"hidden must have shape {[num_rows, sizes.hidden]} and rotation {list(turns)}, "
                f"got {list(hidden.shape)} and {list(rotation.shape)}"
            )
