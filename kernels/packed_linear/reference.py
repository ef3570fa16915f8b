"""The definitions of a packed weight and of a product with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pack(weight: Tensor, panel: int) -> Tensor:
    """``[N, K]`` as ``[ceil(N / panel), K, panel]``: rows side by side, zeros after the last."""
    num_columns, width = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -num_columns % panel))
    return padded.view(-1, panel, width).transpose(1, 2)


def unpack(packed: Tensor, num_columns: int) -> Tensor:
    """What `pack` got."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:num_columns]


def packed_linear(
    x: Tensor, packed: Tensor, num_columns: int, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Arguments as in the package's `packed_linear`, unchecked."""
    product = functional.linear(x, unpack(packed, num_columns), bias)
    return product if residual is None else torch.add(product, residual, out=residual)
