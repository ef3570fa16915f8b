"""rms_norm, alone or after a residual addition, in one pass: a program holds a whole row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.early_launch import launch_options
from kernels.triton_early import begin_early

MAX_WIDTH = 32768
"""Most elements of a row that a program holds in registers."""

_LANES = 32
_MAX_WARPS = 16
_THREAD_WIDTH = 8
"""Elements of a row per thread, as long as there are warps: 16 bytes in two-byte types."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Normalise rows; arguments are as in the package's `rms_norm`, unchecked.

    Raises:
        ValueError: Rows are longer than `MAX_WIDTH`.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return _launch(rows, None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Add and normalise rows; arguments are as in the package's `add_rms_norm`, unchecked.

    Raises:
        ValueError: Rows are longer than `MAX_WIDTH`.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    return _launch(x, residual, weight, eps)


def launch_shape(width: int) -> tuple[int, int]:
    """
    Return tile and warps for rows of `width` elements.

    They depend on nothing else: a row gives the same bits beside any other rows.
    """
    tile = triton.next_power_of_2(width)
    num_warps = min(_MAX_WARPS, max(1, tile // (_LANES * _THREAD_WIDTH)))
    return tile, num_warps


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(
            f"rows of {width} elements are too long for Triton's rms_norm, it takes up to "
            f"{MAX_WIDTH}: choose the reference"
        )
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        tile, num_warps = launch_shape(width)
        _rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight.contiguous(),
            out,
            eps,
            X_STRIDE=_row_stride(x),
            RESIDUAL_STRIDE=0 if residual is None else _row_stride(residual),
            WIDTH=width,
            TILE=tile,
            ADDS=residual is not None,
            num_warps=num_warps,
            **launch_options(),
        )
    return out


def _row_stride(x: Tensor) -> int:
    """
    Return the stride of rows, a constant of the compiled kernel; that of a single row is its width,
    so that it does not depend on how the row was cut out.
    """
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.float32,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """
    Compute out[t] = s / sqrt(mean(s ** 2) + eps) * weight for s = x[t]; if ADDS, for
    s = residual[t] = x[t] + residual[t].

    Grid (T,), one program per row. x, residual [T, WIDTH] and weight [WIDTH] fp32|bf16|fp16, column
    stride 1; out [T, WIDTH], all written. TILE is a power of two; WIDTH <= TILE, and columns >=
    WIDTH are masked. Offsets int64; fp32 inside, rounded after the sum, after the scaling and after
    the weight.
    Oracle: `reference.rms_norm`, `reference.add_rms_norm`.
    """
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < WIDTH
    values = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0)
    if ADDS:
        place = residual + row * RESIDUAL_STRIDE + column
        total = values.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        values = total.to(values.dtype)
        tl.store(place, values, mask=inside)
    wide = values.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / WIDTH
    scaled = (wide * tl.rsqrt(mean_square + eps)).to(values.dtype)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    product = scaled.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(values.dtype), mask=inside)
