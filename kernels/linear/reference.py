"""The definition of linear: row by row, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_chunks: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply; arguments are as in the package's `linear`, unchecked."""
    rows, columns = (tensor.float().chunk(num_chunks, dim=1) for tensor in (x, weight))
    out = tree_sum(list(map(_products, rows, columns)))
    if bias is not None:
        out += bias.float()
    if residual is None:
        return out.to(dtype or x.dtype)
    return residual.copy_(out + residual.float())


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums, and so on."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def _products(x: Tensor, weight: Tensor) -> Tensor:
    if not len(x):
        return torch.zeros((0, weight.shape[0]), dtype=torch.float32, device=x.device)
    return torch.stack([torch.mv(weight, row) for row in x])
