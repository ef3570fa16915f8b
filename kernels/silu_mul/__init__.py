"""The gate of a gated MLP."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import CPU_EXTENSION, Deferred, Operation
from kernels.silu_mul import cpu, cpu_extension, reference

__all__ = ["silu_mul", "use_cpu_extension"]


_operation = Operation(
    "silu_mul",
    reference.silu_mul,
    {
        "cpu": ("cpu", cpu.silu_mul),
        "cuda": ("triton", Deferred("kernels.silu_mul.triton_kernel", "silu_mul")),
    },
)


def use_cpu_extension(*, wanted: bool) -> None:
    """Let a CPU do this in C++ or not, for the whole process; C++ needs the library loaded."""
    _operation.withdraw("cpu", CPU_EXTENSION)
    if wanted:
        _operation.offer("cpu", CPU_EXTENSION, cpu_extension.silu_mul)


def silu_mul(gate_up: Tensor) -> Tensor:
    """
    Multiply SiLU of the first half by the second half.

    Args:
        gate_up: Floating, shape ``[T, 2 * N]``, gate before up. May be overwritten.

    Returns:
        Shape ``[T, N]``, contiguous.

    Raises:
        ValueError: `gate_up` is not two-dimensional, or its width is odd.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have shape [T, 2 * N], got {list(gate_up.shape)}")
    return _operation.on(gate_up.device)(gate_up)
