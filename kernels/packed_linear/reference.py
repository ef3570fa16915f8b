"""The definitions of a packed weight and of a product with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.reference import tree_sum


def pack(weight: Tensor, panel: int, dtype: torch.dtype) -> Tensor:
    """
    Pack ``[N, K]`` with rows side by side and zeros after the last: float32 ``[ceil(N / panel), K,
    panel]``, or bfloat16 ``[ceil(N / panel), K / 2, panel, 2]``.
    """
    num_columns, width = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -num_columns % panel)).to(dtype)
    if dtype == torch.float32:
        return padded.view(-1, panel, width).transpose(1, 2)
    return padded.view(-1, panel, width // 2, 2).transpose(1, 2)


def unpack(packed: Tensor, num_columns: int) -> Tensor:
    """Undo `pack`: return the weight ``[N, K]`` in float32."""
    return packed.transpose(1, 2).flatten(2).flatten(0, 1)[:num_columns].float()


def packed_linear(
    x: Tensor,
    packed: Tensor,
    num_columns: int,
    bias: Tensor | None,
    residual: Tensor | None,
    num_chunks: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply; arguments are as in the package's `packed_linear`, unchecked."""
    rows, weight = (
        tensor.chunk(num_chunks, dim=1) for tensor in (x.float(), unpack(packed, num_columns))
    )
    product = tree_sum(list(map(functional.linear, rows, weight)))
    if bias is not None:
        product += bias.float()
    if residual is None:
        return product.to(dtype)
    return residual.copy_(product + residual)
