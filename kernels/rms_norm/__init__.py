"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import Operation
from kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]

_operation = Operation("rms_norm", reference.rms_norm, {"cpu": ("cpu", cpu.rms_norm)})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Scale each row to a root mean square of 1, then by `weight`.

    Args:
        x: Floating, shape ``[..., N]``.
        weight: Same type, shape ``[N]``.
        eps: Added to the mean square.

    Returns:
        Shape and type of `x`; the mean is taken in float32.

    Raises:
        ValueError: Shapes or types do not match.
    """
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} of shape {list(x.shape[-1:])}, "
            f"got {weight.dtype} {list(weight.shape)}"
        )
    return _operation.on(x.device)(x, weight, eps)
