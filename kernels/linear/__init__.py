"""
A matrix product with a weight in which each row has the same bits alone and beside any other rows.

The framework's own products choose their arithmetic by the number of rows, so that a row's last
bits change with its neighbours. These do not; they are slower, and so used only on request.

Source: batch-invariant products (Thinking Machines Lab, "Defeating Nondeterminism in LLM
Inference", 2025). That work gives up splitting the inner dimension; here the split depends on the
weight alone, so that few rows still occupy the device.
"""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import Deferred, Operation
from kernels.linear import cpu, reference

__all__ = ["linear"]

_operation = Operation(
    "linear",
    reference.linear,
    {
        "cpu": ("cpu", cpu.linear),
        "cuda": ("triton", Deferred("kernels.linear.triton_kernel", "linear")),
    },
)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None
) -> Tensor:
    """
    Multiply rows by a weight, and add bias and residual if given; a row's bits do not depend on
    other rows.

    Args:
        x: Floating, shape ``[T, K]``.
        weight: Same type, shape ``[N, K]``, contiguous.
        bias: Same type, shape ``[N]``.
        residual: Same type, shape ``[T, N]``, contiguous. Overwritten with the sum.

    Returns:
        Shape ``[T, N]`` in the type of `x`; it is `residual` if that is given. Sums are float32.

    Raises:
        ValueError: Shapes, types or strides do not match.
    """
    num_rows, width = x.shape if x.ndim == 2 else (0, 0)
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != width or weight.dtype != x.dtype:
        raise ValueError(
            f"x must have shape [T, K] and weight its type and shape [N, K], got {x.dtype} "
            f"{list(x.shape)} and {weight.dtype} {list(weight.shape)}"
        )
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, its strides are {list(weight.stride())}")
    num_columns = weight.shape[0]
    if bias is not None and (bias.shape != (num_columns,) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias must be {x.dtype} of shape [{num_columns}], got {bias.dtype} {list(bias.shape)}"
        )
    if residual is not None and (
        residual.shape != (num_rows, num_columns)
        or residual.dtype != x.dtype
        or not residual.is_contiguous()
    ):
        raise ValueError(
            f"residual must be contiguous {x.dtype} of shape [{num_rows}, {num_columns}], got "
            f"{residual.dtype} {list(residual.shape)}"
        )
    return _operation.on(x.device)(x, weight, bias, residual)
