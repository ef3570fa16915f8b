"""
linear in Triton, with tiles of one shape and a fixed order of sums.

The number of programs that share a tile of the result depends on the numbers of rows and columns;
its bits do not (`tuning.LinearTuning`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.tuning import LinearTuning, linear_tuning, splits

_MERGED_COLUMNS = 512
"""Columns of one row for which a program adds the parts."""

_MERGED_ROWS = 1024
"""Most rows whose chunks are in memory at a time; their sums take as much as chunks are many."""

_MOST_CHUNKS = 4


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    num_chunks: int = 1,
    dtype: torch.dtype | None = None,
    *,
    split: bool | None = None,
    tuning: LinearTuning | None = None,
) -> Tensor:
    """
    Multiply; arguments are as in the package's `linear`, unchecked. `split` overrides `splits`, and
    `tuning` the table.

    Raises:
        ValueError: Numbers are not of 2 or 4 bytes, or there are more than 4 chunks.
    """
    if num_chunks > _MOST_CHUNKS:
        raise ValueError(f"Triton's product adds up to {_MOST_CHUNKS} chunks, got {num_chunks}")
    num_rows, num_columns = x.shape[0], weight.shape[0]
    if tuning is None:
        tuning = linear_tuning(x.shape[1] // num_chunks, x.dtype)
    if split is None:
        size = {"num_rows": num_rows, "num_columns": num_columns, "num_chunks": num_chunks}
        split = splits(tuning, **size)
    adds, out, x = residual is not None, residual, x.contiguous()
    if out is None:
        out = torch.empty((num_rows, num_columns), dtype=dtype or x.dtype, device=x.device)
    at_once = max(1, num_rows) if num_chunks == 1 else _MERGED_ROWS
    for first in range(0, num_rows, at_once):
        own = slice(first, first + at_once)
        _launch(x[own], weight, bias, out[own], tuning, num_chunks, adds=adds, split=split)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: LinearTuning,
    num_chunks: int,
    *,
    adds: bool,
    split: bool,
) -> None:
    num_rows, num_columns = out.shape
    tiles = triton.cdiv(num_rows, tuning.rows) * triton.cdiv(num_columns, tuning.columns)
    num_sums = num_chunks * (tuning.num_parts if split else 1)
    partial = out  # a placeholder that is not touched
    if num_sums > 1:
        shape = (num_sums, num_rows, num_columns)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    ends = (out if bias is None else bias, out)  # without a bias its place is not touched
    same = {"COLUMNS": num_columns, "BIASED": bias is not None, "ADDS": adds}
    linear_kernel[(tiles, num_sums)](
        x,
        weight,
        *ends,
        partial,
        num_rows,
        WIDTH=x.shape[1],
        CHUNK_WIDTH=x.shape[1] // num_chunks,
        ROW_TILE=tuning.rows,
        COLUMN_TILE=tuning.columns,
        DEPTH=tuning.depth,
        PART_TILES=tuning.part_tiles,
        NUM_PARTS=tuning.num_parts,
        JOINS=not split,
        DIRECT=num_sums == 1,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **same,
    )
    if num_sums > 1:
        merge_kernel[(num_rows, triton.cdiv(num_columns, _MERGED_COLUMNS))](
            partial,
            *ends,
            num_rows,
            NUM_CHUNKS=num_chunks,
            NUM_PARTS=num_sums // num_chunks,
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
    CHUNK_WIDTH: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PART_TILES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    JOINS: tl.constexpr,
    DIRECT: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """
    Multiply a tile of rows by a tile of the weight, over a chunk if JOINS, else over a part of one.

    Grid (row tiles * column tiles, WIDTH / CHUNK_WIDTH * (1 if JOINS else NUM_PARTS)); row tiles of
    one weight follow one another. x [num_rows, WIDTH], weight [COLUMNS, WIDTH] and out [num_rows,
    COLUMNS] contiguous. DIRECT, of one chunk, writes all of out, plus bias [COLUMNS] if BIASED and
    what it held if ADDS; otherwise the sums fill partial, fp32 [second size of the grid, num_rows,
    COLUMNS]. Rows and columns past the last compute the last one again, and their stores are
    masked. Offsets int64; fp32 sums, rounded once.
    Oracle: `reference.linear`.
    """
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    row = tl.program_id(0) % row_tiles * ROW_TILE + tl.arange(0, ROW_TILE)
    column = tl.program_id(0) // row_tiles * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    x_row = x + tl.minimum(row, num_rows - 1).to(tl.int64) * WIDTH
    weight_row = weight + tl.minimum(column, COLUMNS - 1).to(tl.int64) * WIDTH
    held = (row < num_rows)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    own = tl.program_id(1)
    if CHUNK_WIDTH < WIDTH:
        begin = (own if JOINS else own // NUM_PARTS) * CHUNK_WIDTH
        x_row += begin
        weight_row += begin
    if JOINS:
        total = _part_sum(x_row, weight_row, 0, CHUNK_WIDTH, DEPTH, PART_TILES)
        for part in range(1, NUM_PARTS):
            total += _part_sum(x_row, weight_row, part, CHUNK_WIDTH, DEPTH, PART_TILES)
    else:
        total = _part_sum(x_row, weight_row, own % NUM_PARTS, CHUNK_WIDTH, DEPTH, PART_TILES)
    if DIRECT:
        _finish(total, bias, out, at, column, held, COLUMNS, BIASED, ADDS)
    else:
        first = partial + own.to(tl.int64) * num_rows * COLUMNS
        tl.store(first + at, total, mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.int32,
    COLUMNS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """
    Add the sums of linear_kernel: parts in the order and by the arithmetic of JOINS, then chunks,
    which are 1, 2 or 4, as a binary tree.

    Grid (num_rows, cdiv(COLUMNS, COLUMN_TILE)). partial fp32 [NUM_CHUNKS, NUM_PARTS, num_rows,
    COLUMNS], contiguous; bias [COLUMNS], read if BIASED; out [num_rows, COLUMNS], all written,
    after what it held is added if ADDS. Columns >= COLUMNS are masked. Offsets int64; fp32 sums,
    rounded once.
    Oracle: `reference.linear`.
    """
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    held = column < COLUMNS
    at = tl.program_id(0).to(tl.int64) * COLUMNS + column
    size = tl.full([], num_rows, tl.int64) * COLUMNS
    total = _merged(partial + at, held, 0, size, NUM_PARTS)
    if NUM_CHUNKS > 1:
        total += _merged(partial + at, held, 1, size, NUM_PARTS)
    if NUM_CHUNKS > 2:
        later = _merged(partial + at, held, 2, size, NUM_PARTS)
        total += later + _merged(partial + at, held, 3, size, NUM_PARTS)
    _finish(total, bias, out, at, column, held, COLUMNS, BIASED, ADDS)


@triton.jit
def _merged(
    at: tl.tensor,
    held: tl.tensor,
    chunk: tl.constexpr,
    size: tl.int64,
    NUM_PARTS: tl.constexpr,
) -> tl.tensor:
    """Return a chunk's sum from those of its parts, which are `size` numbers apart."""
    total = tl.load(at + chunk * NUM_PARTS * size, mask=held, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):  # unrolled: these loads wait for nothing
        total += tl.load(at + (chunk * NUM_PARTS + part) * size, mask=held, other=0.0)
    return total


@triton.jit
def _part_sum(
    x_row: tl.tensor,
    weight_row: tl.tensor,
    part: tl.tensor,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PART_TILES: tl.constexpr,
) -> tl.tensor:
    """Return one part's sum, fp32 [rows, columns], of the rows at pointers [rows], [columns]."""
    lane = tl.arange(0, DEPTH)
    total = tl.zeros([x_row.shape[0], weight_row.shape[0]], tl.float32)
    first = part * PART_TILES
    for tile in range(first, tl.minimum(first + PART_TILES, tl.cdiv(WIDTH, DEPTH))):
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
