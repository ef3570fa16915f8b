"""Packing of a model's weights into the order in which this machine's products read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from executor_svc.device.huge_pages import ask_for_huge_pages
from executor_svc.model.weights import DecoderWeights
from kernels.layer_stack import MATRICES, LayerWeights
from kernels.packed_linear import PackedWeight, packed_dtype, packed_elements


def pack_weights(held: list[DecoderWeights]) -> DecoderWeights:
    """
    Pack every matrix of a model, one after the other.

    Args:
        held: A list with the only reference to the weights, which is taken out of it: each matrix
            is freed once it is packed, so that only one at a time is in memory twice.

    Returns:
        The same weights with a `PackedWeight` for each matrix of a product; the embedding stays as
        it is unless it is the output projection too, and so does an output projection without
        rows, which another stage has.
    """
    weights = held.pop()
    layers, others = list(weights.layers), replace(weights, layers=())
    del weights
    heads = [others.lm_head] if len(others.lm_head) else []
    memory = _Memory([*(matrix for layer in layers for matrix in _matrices(layer)), *heads])
    for index in range(len(layers)):
        packed = map(memory.pack, _matrices(layers[index]))
        layers[index] = replace(layers[index], **dict(zip(MATRICES, packed, strict=True)))
    head = memory.pack(others.lm_head) if heads else others.lm_head
    is_tied = others.lm_head is others.embedding
    return replace(
        others,
        layers=tuple(layers),
        lm_head=head,
        embedding=head if is_tied else others.embedding,
    )


class _Memory:
    """
    One buffer for all packed matrices, because most are too small for huge pages of their own. A
    page takes no memory until a matrix is written there.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._dtypes = deque(map(packed_dtype, matrices))
        sizes = map(_packed_bytes, matrices, self._dtypes)
        self._left = torch.empty(sum(sizes), dtype=torch.uint8)
        ask_for_huge_pages(self._left)

    def pack(self, matrix: Tensor) -> PackedWeight:
        """Pack the next matrix into the rest of the buffer."""
        dtype = self._dtypes.popleft()
        size = _packed_bytes(matrix, dtype)
        taken, self._left = self._left[:size], self._left[size:]
        return PackedWeight.of(matrix, taken.view(dtype))


def _packed_bytes(matrix: Tensor, dtype: torch.dtype) -> int:
    return packed_elements(*matrix.shape) * dtype.itemsize


def _matrices(layer: LayerWeights) -> list[Tensor]:
    return [getattr(layer, name) for name in MATRICES]
