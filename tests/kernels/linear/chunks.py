"""Products of which the order of chunks' sums shows, whatever computes them."""

from __future__ import annotations

import torch

NUM_CHUNKS = 4


def telling(
    rows: int, width: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return rows ``[T, K]`` and a weight ``[N, K]`` with exact sums of chunks, each a small number or
    one so large that small ones beside it are rounded: most orders of adding them differ.
    """
    source = torch.Generator().manual_seed(width)
    large = 2.0**12
    x, weight = torch.zeros((rows, width)), torch.zeros((columns, width))
    size = width // NUM_CHUNKS
    for chunk in range(NUM_CHUNKS):
        first, second = (torch.randperm(size, generator=source)[:2] + chunk * size).tolist()
        x[:, first] = large
        x[:, second] = 1 + 2.0 * torch.randint(3, (rows,), generator=source)
        is_large = torch.rand(columns, generator=source) < 0.5
        sign = 1 - 2.0 * torch.randint(2, (columns,), generator=source)
        weight[:, first] = torch.where(is_large, sign * large, 0.0)
        weight[:, second] = torch.where(is_large, 0.0, sign)
    return x.to(dtype), weight.to(dtype)


def one_after_another(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sums of chunks added from the first to the last, in float32."""
    chunks = zip(x.float().chunk(NUM_CHUNKS, 1), weight.float().chunk(NUM_CHUNKS, 1), strict=True)
    first, *others = (rows @ columns.T for rows, columns in chunks)
    for each in others:
        first = first + each
    return first
