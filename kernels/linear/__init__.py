"""
A matrix product with a weight in which each row has the same bits alone and beside any other rows,
and each column alone and beside any other columns.

The framework's own products choose their arithmetic by the number of rows, so that a row's last
bits change with its neighbours. These do not; they are slower, and so used only on request.

Source: batch-invariant products (Thinking Machines Lab, "Defeating Nondeterminism in LLM
Inference", 2025). That work gives up splitting the inner dimension; here the split depends on the
weight alone, so that few rows still occupy the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import Deferred, Operation
from kernels.linear import cpu, reference

__all__ = ["check_chunks", "linear"]

_operation = Operation(
    "linear",
    reference.linear,
    {
        "cpu": ("cpu", cpu.linear),
        "cuda": ("triton", Deferred("kernels.linear.triton_kernel", "linear")),
    },
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    num_chunks: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """
    Multiply rows by a weight, and add bias and residual if given; a number's bits depend on its row
    of `x`, its row of `weight`, and what is added to it.

    With several chunks they depend on chunks alone: the product with half of them has the bits of
    that subtree's sum. So those who hold neighbouring columns of a weight can add their parts up to
    the bits of the whole.

    Args:
        x: Floating, shape ``[T, K]``.
        weight: Same type, shape ``[N, K]``, contiguous.
        bias: Type of the result, shape ``[N]``.
        residual: Same type, shape ``[T, N]``, contiguous. Overwritten with the sum.
        num_chunks: Equal parts that K is cut into, a power of two. Each is summed from zero in
            float32, these sums are added as a binary tree, neighbours first, then bias and
            residual.
        dtype: Type of the result: that of `x` if None, or float32.

    Returns:
        Shape ``[T, N]``; it is `residual` if that is given. Sums are float32, and with several
        chunks rounded once.

    Raises:
        ValueError: Shapes, types or strides do not match.
    """
    num_rows, width = x.shape if x.ndim == 2 else (0, 0)
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != width or weight.dtype != x.dtype:
        raise ValueError(
            f"x must have shape [T, K] and weight its type and shape [N, K], got {x.dtype} "
            f"{list(x.shape)} and {weight.dtype} {list(weight.shape)}"
        )
    kind = dtype or x.dtype
    if kind not in (x.dtype, torch.float32):
        raise ValueError(f"a product of {x.dtype} can be had in that type or float32, not {kind}")
    if num_chunks != 1:
        check_chunks(num_chunks, width)
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, its strides are {list(weight.stride())}")
    _check_added(bias, residual, (num_rows, weight.shape[0]), kind)
    return _operation.on(x.device)(x, weight, bias, residual, num_chunks, kind)


def check_chunks(num_chunks: int, width: int) -> None:
    """
    Check that so many equal chunks make up a product's inner dimension, and a binary tree.

    Raises:
        ValueError: They do not.
    """
    if num_chunks < 1 or num_chunks & (num_chunks - 1) or width % num_chunks:
        raise ValueError(
            f"the number of chunks must be a power of two that divides the width {width}, got "
            f"{num_chunks}"
        )


def _check_added(
    bias: Tensor | None, residual: Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Check what is added to a product; raise ValueError if it does not fit."""
    if bias is not None and (bias.shape != shape[1:] or bias.dtype != dtype):
        raise ValueError(
            f"bias must be {dtype} of shape {list(shape[1:])}, got {bias.dtype} {list(bias.shape)}"
        )
    if residual is None:
        return
    if residual.shape != shape or residual.dtype != dtype or not residual.is_contiguous():
        raise ValueError(
            f"residual must be contiguous {dtype} of shape {list(shape)}, got {residual.dtype} "
            f"{list(residual.shape)}"
        )
