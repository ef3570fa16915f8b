"""
linear in Triton, with tiles of one shape and a fixed order of sums.

The number of programs that share a tile of the result depends on the number of rows; its bits do
not (`tuning.LinearTuning`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.tuning import LinearTuning, linear_tuning, splits

_MERGED_COLUMNS = 512
"""Columns of one row for which a program adds the chunks."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    split: bool | None = None,
) -> Tensor:
    """
    Multiply; arguments are as in the package's `linear`, unchecked. `split` overrides `splits`.

    Raises:
        ValueError: Numbers are not of 2 or 4 bytes.
    """
    num_rows, num_columns = x.shape[0], weight.shape[0]
    tuning = linear_tuning(num_columns, x.shape[1], x.dtype)
    if split is None:
        split = splits(tuning, num_rows=num_rows, num_columns=num_columns)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if num_rows:
        _launch(x.contiguous(), weight, bias, out, tuning, adds=residual is not None, split=split)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: LinearTuning,
    *,
    adds: bool,
    split: bool,
) -> None:
    num_rows, num_columns = out.shape
    tiles = triton.cdiv(num_rows, tuning.rows) * triton.cdiv(num_columns, tuning.columns)
    partial = out  # a placeholder that is not touched
    if split:
        shape = (tuning.num_chunks, num_rows, num_columns)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    ends = (out if bias is None else bias, out)  # without a bias its place is not touched
    same = {"COLUMNS": num_columns, "BIASED": bias is not None, "ADDS": adds}
    linear_kernel[(tiles, tuning.num_chunks if split else 1)](
        x,
        weight,
        *ends,
        partial,
        num_rows,
        WIDTH=x.shape[1],
        ROW_TILE=tuning.rows,
        COLUMN_TILE=tuning.columns,
        DEPTH=tuning.depth,
        CHUNK_TILES=tuning.chunk_tiles,
        NUM_CHUNKS=tuning.num_chunks,
        DIRECT=not split,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **same,
    )
    if split:
        merge_kernel[(num_rows, triton.cdiv(num_columns, _MERGED_COLUMNS))](
            partial,
            *ends,
            num_rows,
            NUM_CHUNKS=tuning.num_chunks,
            COLUMN_TILE=_MERGED_COLUMNS,
            num_warps=4,
            **same,
        )


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    num_rows: tl.int32,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    DIRECT: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """
    Multiply a tile of rows by a tile of the weight, over all chunks or over one.

    Grid (row tiles * column tiles, 1 if DIRECT else NUM_CHUNKS); row tiles of one weight follow one
    another. x [num_rows, WIDTH], weight [COLUMNS, WIDTH] and out [num_rows, COLUMNS] contiguous.
    DIRECT writes all of out, plus bias [COLUMNS] if BIASED and what it held if ADDS; otherwise
    chunks write all of partial, fp32 [NUM_CHUNKS, num_rows, COLUMNS]. Rows and columns past the
    last compute the last one again, and their stores are masked. Offsets int64; fp32 sums, rounded
    once.
    Oracle: `reference.linear`.
    """
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    row = tl.program_id(0) % row_tiles * ROW_TILE + tl.arange(0, ROW_TILE)
    column = tl.program_id(0) // row_tiles * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    x_row = x + tl.minimum(row, num_rows - 1).to(tl.int64) * WIDTH
    weight_row = weight + tl.minimum(column, COLUMNS - 1).to(tl.int64) * WIDTH
    held = (row < num_rows)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    if DIRECT:
        total = _chunk_sum(x_row, weight_row, 0, WIDTH, DEPTH, CHUNK_TILES)
        for chunk in range(1, NUM_CHUNKS):
            total += _chunk_sum(x_row, weight_row, chunk, WIDTH, DEPTH, CHUNK_TILES)
        _finish(total, bias, out, at, column, held, COLUMNS, BIASED, ADDS)
    else:
        chunk = tl.program_id(1)
        total = _chunk_sum(x_row, weight_row, chunk, WIDTH, DEPTH, CHUNK_TILES)
        first = partial + chunk.to(tl.int64) * num_rows * COLUMNS
        tl.store(first + at, total, mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.int32,
    COLUMNS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """
    Add the chunks of linear_kernel, in the order and by the arithmetic of DIRECT.

    Grid (num_rows, cdiv(COLUMNS, COLUMN_TILE)). partial fp32 [NUM_CHUNKS, num_rows, COLUMNS],
    contiguous; bias [COLUMNS], read if BIASED; out [num_rows, COLUMNS], all written, after what it
    held is added if ADDS. Columns >= COLUMNS are masked. Offsets int64; fp32 sums, rounded once.
    Oracle: `reference.linear`.
    """
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    held = column < COLUMNS
    at = tl.program_id(0).to(tl.int64) * COLUMNS + column
    total = tl.load(partial + at, mask=held, other=0.0)
    for chunk in tl.static_range(1, NUM_CHUNKS):  # unrolled: these loads wait for nothing
        first = partial + tl.full([], chunk, tl.int64) * num_rows * COLUMNS
        total += tl.load(first + at, mask=held, other=0.0)
    _finish(total, bias, out, at, column, held, COLUMNS, BIASED, ADDS)


@triton.jit
def _chunk_sum(
    x_row: tl.tensor,
    weight_row: tl.tensor,
    chunk: tl.tensor,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
) -> tl.tensor:
    """Return one chunk's sum, fp32 [rows, columns], of the rows at pointers [rows], [columns]."""
    lane = tl.arange(0, DEPTH)
    total = tl.zeros([x_row.shape[0], weight_row.shape[0]], tl.float32)
    first = chunk * CHUNK_TILES
    for tile in range(first, tl.minimum(first + CHUNK_TILES, tl.cdiv(WIDTH, DEPTH))):
        place = (tile * DEPTH + lane)[None, :]
        left = tl.load(x_row[:, None] + place, mask=place < WIDTH, other=0.0)
        right = tl.load(weight_row[:, None] + place, mask=place < WIDTH, other=0.0)
        total = tl.dot(left, right.T, total, input_precision="ieee")
    return total


@triton.jit
def _finish(
    total: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    at: tl.tensor,
    column: tl.tensor,
    held: tl.tensor,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Write fp32 sums where `held`, after bias and addition, rounded once to the type of out."""
    if BIASED:
        total += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(out + at, mask=held, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=held)
