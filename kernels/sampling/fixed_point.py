"""Probabilities as integers, whose sums are exact: in any order, and over any division of ids."""

from __future__ import annotations

import torch
from torch import Tensor

MASS_SCALE = 2.0**40
"""Integer mass of the likeliest id: the masses of fewer than 2**23 ids sum without overflow."""


def mass(scaled: Tensor) -> Tensor:
    """
    Compute unnormalised probabilities as int64 fixed point with 40 binary places.

    Sums of integers are exact, so a nucleus does not depend on the order or shape of a reduction.
    """
    return (scaled.exp() * MASS_SCALE).to(torch.int64)


def log_of_mass(best: Tensor, total: Tensor) -> Tensor:
    """
    Compute the logarithm of a sum of e ** (value - best) in fixed point: float32, shaped as both
    arguments.

    Args:
        best: float32, the largest value; NaN is returned where it is not finite.
        total: int64, sum of `mass` of the values' differences to the best.
    """
    exact = (total.double() / MASS_SCALE).log().float()
    return torch.where(best.isfinite(), exact, torch.nan)
