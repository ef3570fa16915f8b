"""rms_norm and add_rms_norm through the framework's own operation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows; arguments are as in the package's `rms_norm`, unchecked."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add and normalise rows; arguments are as in the package's `add_rms_norm`, unchecked."""
    return functional.rms_norm(residual.add_(x), weight.shape, weight, eps)
