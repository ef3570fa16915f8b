"""
Begin and end of a decode step on the device: rows are filled from their slots, and slots take the
tokens that their rows drew.

In between the step reads only rows, so that a replay of a captured graph computes the next step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.decode_rows import reference
from kernels.decode_rows.columns import DecodeRowColumns, SlotColumns, TokenRing
from kernels.dispatch import Deferred, Operation

__all__ = ["DecodeRowColumns", "SlotColumns", "TokenRing", "advance_rows", "gather_rows"]

_TRITON = "kernels.decode_rows.triton_kernel"

_gather: Operation[Callable[[SlotColumns, DecodeRowColumns, TokenRing, int], None]] = Operation(
    "gather_rows",
    reference.gather_rows,
    {"cuda": ("triton", Deferred(_TRITON, "gather_rows"))},
)
_advance: Operation[Callable[[SlotColumns, DecodeRowColumns, Tensor, Tensor, TokenRing], None]] = (
    Operation(
        "advance_rows",
        reference.advance_rows,
        {"cuda": ("triton", Deferred(_TRITON, "advance_rows"))},
    )
)


def gather_rows(
    slots: SlotColumns, rows: DecodeRowColumns, ring: TokenRing, block_size: int
) -> None:
    """
    Begin a step: fill the rows from the slots that `rows.slot` names, and advance to the next line
    of the ring. Nothing is read on the host.

    Args:
        slots: Columns of the sequences.
        rows: Columns of the rows, overwritten except for `slot`. Real rows have distinct slots in
            [0, S) with tables that hold the token's position.
        ring: The ring; its `line` is advanced.
        block_size: Positions of a block.

    Raises:
        ValueError: A row has another number of blocks than a slot.
    """
    if rows.block_table.shape[1] != slots.block_table.shape[1]:
        raise ValueError(
            f"rows have tables of {rows.block_table.shape[1]} blocks, slots of "
            f"{slots.block_table.shape[1]}"
        )
    _gather.on(rows.slot.device)(slots, rows, ring, block_size)


def advance_rows(
    slots: SlotColumns, rows: DecodeRowColumns, token: Tensor, valid: Tensor, ring: TokenRing
) -> None:
    """
    End a step: each drawn token becomes its slot's next token, one position on, and is written to
    the ring. Rows of padding change nothing that is read.

    Args:
        slots: Columns of the sequences; `position` and `history` are changed.
        rows: Columns of the rows as `gather_rows` left them.
        token: int64 ``[R]``, in the vocabulary even if not valid.
        valid: bool ``[R]``.
        ring: The ring; the first R entries of its line are written.

    Raises:
        ValueError: There is not one token per row, or the type is another.
    """
    num_rows = len(rows.slot)
    if token.shape != (num_rows,) or token.dtype != torch.int64 or valid.shape != token.shape:
        raise ValueError(
            f"{num_rows} rows need as many int64 tokens and validities, got {token.dtype} "
            f"{list(token.shape)} and {list(valid.shape)}"
        )
    _advance.on(rows.slot.device)(slots, rows, token, valid, ring)
