"""Log-sum-exp of each row, summed in an order that does not depend on the batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 4096
"""Number of ids that one program sums. It changes bits, so it must not depend on the batch."""


def log_total(values: Tensor) -> Tensor:
    """Compute the log-sum-exp of float32 ``[Q, V]``, contiguous: float32 ``[Q, 1]``."""
    num_rows, vocab_size = values.shape
    split = min(SPLIT, triton.next_power_of_2(vocab_size))
    num_splits = triton.cdiv(vocab_size, split)
    largest = torch.empty((num_rows, num_splits), dtype=torch.float32, device=values.device)
    total = torch.empty_like(largest)
    out = torch.empty((num_rows, 1), dtype=torch.float32, device=values.device)
    if num_rows:
        grid = (num_rows, num_splits)
        _part_kernel[grid](values, largest, total, VOCAB=vocab_size, SPLIT=split)
        splits_2 = triton.next_power_of_2(num_splits)
        _merge_kernel[(num_rows,)](
            largest, total, out, NUM_SPLITS=num_splits, SPLITS_2=splits_2, num_warps=1
        )
    return out


@triton.jit
def _sum_from(x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Return `exp(x - peak)`, 0 where both are -infinity, and NaN where x is one."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - peak))


@triton.jit
def _part_kernel(
    values: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """
    Compute the maximum of each split of a row, and the sum of e ** (value - maximum) over it.

    Grid (Q, cdiv(VOCAB, SPLIT)). values fp32 [Q, VOCAB], contiguous; largest, total fp32 [Q,
    cdiv(VOCAB, SPLIT)], all written; ids >= VOCAB are masked. Offsets int64; fp32 sums.
    Oracle: `reference.totals`, together with `_merge_kernel`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    x = tl.load(values + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    peak = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + split
    tl.store(largest + at, peak)
    tl.store(total + at, tl.sum(_sum_from(x, peak), axis=0))


@triton.jit
def _merge_kernel(
    largest: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
) -> None:
    """
    Merge a row's splits to its log-sum-exp, -infinity if all its values are.

    Grid (Q,). largest, total fp32 [Q, NUM_SPLITS] as from `_part_kernel`; out fp32 [Q], all
    written. SPLITS_2 is a power of two; splits >= NUM_SPLITS are masked. Offsets int64.
    Oracle: `reference.totals`.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_2)
    known = split < NUM_SPLITS
    part = tl.load(largest + row * NUM_SPLITS + split, mask=known, other=float("-inf"))
    mine = tl.load(total + row * NUM_SPLITS + split, mask=known, other=0.0)
    peak = tl.max(part, axis=0)
    tl.store(out + row, peak + tl.log(tl.sum(mine * _sum_from(part, peak), axis=0)))
