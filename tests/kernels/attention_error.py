"""
Bound on the error of attention in floating point against its definition.

A rounding is off by at most the unit roundoff of its type, and a sum of n terms, each rounded once,
by about the square root of n times that and the sum of the terms' sizes. Source: Higham and Mary,
"A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019. Errors
of weights are added as if all had one sign, which leaves room. Nothing here depends on what another
implementation achieves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding to a type."""

ROUNDINGS_OF_A_WEIGHT = 8
"""
Number of roundings: of the scale, the difference from the largest score, its exponential (4 at
most), and rescaling.
"""


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention of some queries, and by how much each number may miss it; float64 ``[Q, H, D]``."""

    exact: Tensor
    allowed: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Attended]) -> Attended:
        """The queries of all parts, in order."""
        return cls(
            torch.cat([part.exact for part in parts]), torch.cat([part.allowed for part in parts])
        )


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    scale: float,
    weight_dtype: torch.dtype = torch.float32,
) -> Attended:
    """
    Attend in float64, and follow the errors of an implementation that sums in float32.

    Args:
        query: ``[Q, H, D]``, as rounded as the implementation gets it; its type is the result's.
        key: ``[L, K, D]``.
        value: ``[L, K, D]``.
        seen: bool ``[Q, L]``: which keys a query sees.
        scale: Multiplies the scores.
        weight_dtype: What weights are rounded to before they multiply values.
    """
    num_keys, num_kv_heads, head_dim = key.shape
    group = query.shape[1] // num_kv_heads
    wide, keys = query.double(), key.double().repeat_interleave(group, dim=1)
    values = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", wide, keys) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    exact = torch.einsum("hqk,khd->qhd", weights, values)
    # Error of each weight, relative to it: of its score's sum, and of the steps after that.
    sizes = torch.einsum("qhd,khd->hqk", wide.abs(), keys.abs()) * scale
    unit = UNIT[torch.float32]
    relative = unit * (head_dim**0.5 * sizes + ROUNDINGS_OF_A_WEIGHT + num_keys**0.5)
    error = weights * relative
    if weight_dtype != torch.float32:
        tiny = torch.finfo(weight_dtype).tiny * weights.amax(dim=-1, keepdim=True)
        error += UNIT[weight_dtype] * torch.maximum(weights, tiny) * seen
    # Errors of the numerator, and of the denominator.
    allowed = torch.einsum("hqk,khd->qhd", error, values.abs())
    allowed += exact.abs() * error.sum(dim=-1).T[..., None]
    rounded = torch.finfo(query.dtype)
    allowed += UNIT[query.dtype] * exact.abs().clamp(min=rounded.tiny)
    return Attended(exact, allowed)


def assert_errs_little(expected: Attended, found: Tensor) -> None:
    """Assert that every number is as near to the exact one as the arithmetic promises."""
    error = (found.double().cpu() - expected.exact).abs()
    worst = (error / expected.allowed).max().item()
    assert worst <= 1, f"an error is {worst} times what is allowed"
