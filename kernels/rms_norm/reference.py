"""The definitions of rms_norm and add_rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows; arguments are as in the package's `rms_norm`, unchecked."""
    wide = x.to(torch.float32)
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add and normalise rows; arguments are as in the package's `add_rms_norm`, unchecked."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
