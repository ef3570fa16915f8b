"""Builders and exact statistics that the sampling tests share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.sampling import SamplingColumns


def make_columns(
    num_rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    seed: int | list[int] = 7,
    first_position: int = 0,
    choice: int = 0,
    min_p: float | list[float] | None = None,
) -> SamplingColumns:
    """Return columns of `num_rows` rows at consecutive positions; lists give one value per row."""

    def column(value: object, dtype: torch.dtype) -> Tensor:
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype)

    return SamplingColumns(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        seed=column(seed, torch.int64),
        position=torch.arange(first_position, first_position + num_rows),
        choice=column(choice, torch.int64),
        min_p=None if min_p is None else column(min_p, torch.float32),
    )


def random_logits(num_rows: int, vocab_size: int, *, spread: float = 3.0, seed: int = 1) -> Tensor:
    """Return normal logits, the same ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def chi_square_limit(degrees: int, z: float = 3.5) -> float:
    """
    Return the value that chi-square of so many degrees passes with the chance of a normal passing
    z.
    """
    spread = 2 / (9 * degrees)  # Wilson and Hilferty's cube-root approximation
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """Return Pearson's statistic of counts against expected counts, all positive."""
    return float(((observed - expected) ** 2 / expected).sum())


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation of two samples of equal shape."""
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])
