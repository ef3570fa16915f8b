"""gather_rows and advance_rows in Triton, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_rows.columns import DecodeRowColumns, SlotColumns, TokenRing

TABLE_TILE = 256
ROW_TILE = 128
NUM_WARPS = 2


def gather_rows(
    slots: SlotColumns, rows: DecodeRowColumns, ring: TokenRing, block_size: int
) -> None:
    """Begin a step; arguments are as in the package's `gather_rows`, unchecked."""
    sampling = rows.sampling
    _gather_rows_kernel[(len(rows.slot),)](
        rows.slot,
        slots.position,
        slots.block_table,
        slots.history,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.seed,
        slots.choice,
        slots.min_p,
        rows.token_id,
        rows.position,
        rows.kv_position,
        rows.seq_len,
        rows.block_table,
        sampling.position,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,
        sampling.choice,
        sampling.min_p,
        ring.line,
        BLOCKS=rows.block_table.shape[1],
        HISTORY=slots.history.shape[1],
        BLOCK=block_size,
        LINES=ring.tokens.shape[0],
        TILE=TABLE_TILE,
        num_warps=NUM_WARPS,
    )


def advance_rows(
    slots: SlotColumns, rows: DecodeRowColumns, token: Tensor, valid: Tensor, ring: TokenRing
) -> None:
    """End a step; arguments are as in the package's `advance_rows`, unchecked."""
    num_rows = len(rows.slot)
    _advance_rows_kernel[(triton.cdiv(num_rows, ROW_TILE),)](
        rows.slot,
        rows.position,
        token,
        valid,
        slots.position,
        slots.history,
        ring.tokens,
        ring.line,
        num_rows,
        HISTORY=slots.history.shape[1],
        WIDTH=ring.tokens.shape[1],
        TILE=ROW_TILE,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _gather_rows_kernel(
    slot: tl.tensor,
    slot_position: tl.tensor,
    slot_table: tl.tensor,
    history: tl.tensor,
    slot_temperature: tl.tensor,
    slot_top_k: tl.tensor,
    slot_top_p: tl.tensor,
    slot_seed: tl.tensor,
    slot_choice: tl.tensor,
    slot_min_p: tl.tensor,
    token_id: tl.tensor,
    position: tl.tensor,
    kv_position: tl.tensor,
    seq_len: tl.tensor,
    table: tl.tensor,
    drawn_position: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    min_p: tl.tensor,
    line: tl.tensor,
    BLOCKS: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Set row r to the columns of slot[r], masked where negative. Oracle: `reference.gather_rows`.
    Grid (R,). Types: SlotColumns, DecodeRowColumns; tables are copied up to the row's position.
    Program 0 alone reads and changes line. Offsets int64: S * HISTORY can pass 2**31.
    """
    row = tl.program_id(0).to(tl.int64)
    here = tl.load(slot + row).to(tl.int64)
    real = here >= 0
    at = tl.load(slot_position + here, mask=real, other=0).to(tl.int64)
    block = tl.load(slot_table + here * BLOCKS + at // BLOCK, mask=real, other=0).to(tl.int64)
    length = tl.where(real, at + 1, 0)
    tl.store(token_id + row, tl.load(history + here * HISTORY + at, mask=real, other=0))
    tl.store(position + row, at)
    tl.store(kv_position + row, tl.where(real, block * BLOCK + at % BLOCK, 0))
    tl.store(seq_len + row, length.to(tl.int32))
    tl.store(drawn_position + row, at + 1)
    tl.store(temperature + row, tl.load(slot_temperature + here, mask=real, other=0.0))
    tl.store(top_k + row, tl.load(slot_top_k + here, mask=real, other=0))
    tl.store(top_p + row, tl.load(slot_top_p + here, mask=real, other=1.0))
    tl.store(seed + row, tl.load(slot_seed + here, mask=real, other=0))
    tl.store(choice + row, tl.load(slot_choice + here, mask=real, other=0))
    tl.store(min_p + row, tl.load(slot_min_p + here, mask=real, other=0.0))
    num_blocks = tl.cdiv(length, BLOCK)
    for first in range(0, num_blocks, TILE):
        entry = first + tl.arange(0, TILE)
        used = entry < num_blocks
        blocks = tl.load(slot_table + here * BLOCKS + entry, mask=used, other=0)
        tl.store(table + row * BLOCKS + entry, blocks, mask=used)
    if tl.program_id(0) == 0:
        tl.store(line, (tl.load(line) + 1) % LINES)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token", "valid"])
def _advance_rows_kernel(
    slot: tl.tensor,
    position: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    slot_position: tl.tensor,
    history: tl.tensor,
    ring: tl.tensor,
    line: tl.tensor,
    num_rows: tl.int32,
    HISTORY: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Write token to history[slot, position + 1] and to ring[line], there -1 if padding or not valid,
    and position + 1 to slot_position[slot].

    Grid (cdiv(num_rows, TILE),). slot [R] int32, negative for padding; position, token [R] int64;
    valid [R] bool; slot_position [S], history [S, HISTORY], ring [LINES, WIDTH] int32. Rows >=
    num_rows are masked; no two other rows have one slot. Offsets int64.
    Oracle: `reference.advance_rows`.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    here = tl.load(slot + row, mask=inside, other=-1).to(tl.int64)
    real = here >= 0
    following = tl.load(position + row, mask=real, other=0) + 1
    drawn = tl.load(token + row, mask=inside, other=0).to(tl.int32)
    is_valid = tl.load(valid + row, mask=inside, other=0).to(tl.int1)
    tl.store(history + here * HISTORY + following, drawn, mask=real)
    tl.store(slot_position + here, following.to(tl.int32), mask=real)
    told = tl.where(real & is_valid, drawn, -1)
    tl.store(ring + tl.load(line).to(tl.int64) * WIDTH + row, told, mask=inside)
