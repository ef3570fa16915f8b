"""Root-mean-square normalisation with a learned scale, alone or after a residual addition."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import CPU_EXTENSION, Deferred, Operation
from kernels.rms_norm import cpu, cpu_extension, reference

__all__ = ["add_rms_norm", "rms_norm", "use_cpu_extension"]

_TRITON = "kernels.rms_norm.triton_kernel"


_operation = Operation(
    "rms_norm",
    reference.rms_norm,
    {"cpu": ("cpu", cpu.rms_norm), "cuda": ("triton", Deferred(_TRITON, "rms_norm"))},
)
_add_operation = Operation(
    "add_rms_norm",
    reference.add_rms_norm,
    {"cpu": ("cpu", cpu.add_rms_norm), "cuda": ("triton", Deferred(_TRITON, "add_rms_norm"))},
)


def use_cpu_extension(*, wanted: bool) -> None:
    """Let a CPU do this in C++ or not, for the whole process; C++ needs the library loaded."""
    _operation.withdraw("cpu", CPU_EXTENSION)
    _add_operation.withdraw("cpu", CPU_EXTENSION)
    if wanted:
        _operation.offer("cpu", CPU_EXTENSION, cpu_extension.rms_norm)
        _add_operation.offer("cpu", CPU_EXTENSION, cpu_extension.add_rms_norm)


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
    _check_weight(x, weight)
    return _operation.on(x.device)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Add `x` to `residual` in place, and normalise the sum as `rms_norm` does.

    Args:
        x: Floating, shape ``[T, N]``.
        residual: Same type and shape, elements of a row adjacent. Overwritten with the sum, rounded
            to its type; that is what is normalised.
        weight: Same type, shape ``[N]``.
        eps: Added to the mean square.

    Returns:
        Shape and type of `x`.

    Raises:
        ValueError: Shapes, types or strides do not match.
    """
    _check_weight(x, weight)
    if x.ndim != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"x and residual must have one type and one shape [T, N], got {x.dtype} "
            f"{list(x.shape)} and {residual.dtype} {list(residual.shape)}"
        )
    if residual.stride(1) != 1:
        raise ValueError(f"a row of residual must be adjacent, its stride is {residual.stride(1)}")
    return _add_operation.on(x.device)(x, residual, weight, eps)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} of shape {list(x.shape[-1:])}, "
            f"got {weight.dtype} {list(weight.shape)}"
        )
