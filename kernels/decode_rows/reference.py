"""The definitions of gather_rows and advance_rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode_rows.columns import DecodeRowColumns, SlotColumns, TokenRing


def gather_rows(
    slots: SlotColumns, rows: DecodeRowColumns, ring: TokenRing, block_size: int
) -> None:
    """Begin a step; arguments are as in the package's `gather_rows`, unchecked."""
    is_real = rows.slot >= 0
    slot = rows.slot.clamp(min=0).long()
    position = torch.where(is_real, slots.position[slot], 0).long()
    block_table = slots.block_table[slot]
    block = block_table.gather(1, (position // block_size)[:, None])[:, 0]
    rows.token_id.copy_(torch.where(is_real, slots.history[slot, position], 0))
    rows.position.copy_(position)
    rows.kv_position.copy_(torch.where(is_real, block * block_size + position % block_size, 0))
    rows.seq_len.copy_(torch.where(is_real, position + 1, 0))
    rows.block_table.copy_(block_table)
    sampling = rows.sampling
    assert sampling.min_p is not None, "decode rows always have the column"
    sampling.position.copy_(position + 1)
    for target, source, of_padding in (
        (sampling.temperature, slots.temperature, 0.0),
        (sampling.top_k, slots.top_k, 0),
        (sampling.top_p, slots.top_p, 1.0),
        (sampling.seed, slots.seed, 0),
        (sampling.choice, slots.choice, 0),
        (sampling.min_p, slots.min_p, 0.0),
    ):
        target.copy_(torch.where(is_real, source[slot], of_padding))
    ring.line.add_(1).remainder_(ring.tokens.shape[0])


def advance_rows(
    slots: SlotColumns, rows: DecodeRowColumns, token: Tensor, valid: Tensor, ring: TokenRing
) -> None:
    """End a step; arguments are as in the package's `advance_rows`, unchecked."""
    is_real = rows.slot >= 0
    slot = rows.slot.clamp(min=0).long()
    unread = slots.history.shape[1] - 1
    column = torch.where(is_real, rows.position + 1, unread)
    slots.history[slot, column] = token.to(torch.int32)
    slots.position.index_add_(0, slot, is_real.to(torch.int32))
    told = torch.where(is_real & valid, token, -1).to(torch.int32)
    ring.tokens[:, : len(told)].index_copy_(0, ring.line.long(), told[None])
