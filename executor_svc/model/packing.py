"""The weights of a model in the order in which products on this machine read them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from executor_svc.model.weights import DecoderWeights, LayerWeights
from kernels.packed_linear import PackedWeight

_MATRICES = ("qkv", "output", "gate_up", "down")


def pack_weights(held: list[DecoderWeights]) -> DecoderWeights:
    """
    Pack every matrix of a model, one after the other.

    Args:
        held: The weights, and the only reference to them: it is taken out, so that each matrix goes
            once it is packed, and one of them at a time is there twice.

    Returns:
        The same with a `PackedWeight` for each matrix of a product; the embedding stays as it is
        unless it is the output projection too.
    """
    weights = held.pop()
    layers, others = list(weights.layers), replace(weights, layers=())
    del weights
    for index in range(len(layers)):
        layers[index] = _pack_layer(layers[index])
    head = PackedWeight.of(others.lm_head)
    is_tied = others.lm_head is others.embedding
    return replace(
        others,
        layers=tuple(layers),
        lm_head=head,
        embedding=head if is_tied else others.embedding,
    )


def _pack_layer(layer: LayerWeights) -> LayerWeights:
    packed: dict[str, Tensor] = {name: PackedWeight.of(getattr(layer, name)) for name in _MATRICES}
    return replace(layer, **packed)
