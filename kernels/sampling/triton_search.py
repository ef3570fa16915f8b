"""
The cuts of top_k and top_p by a search for the threshold: no sort, no atomics that could differ.

Scaled logits are at most 0, so the bits of their absolute value order them, the best first: those
bits are the *key*. Both cuts ask for the smallest key t at which the weight of all keys up to t
reaches a goal: the weight of an id is 1 for top_k and its fixed-point mass for top_p. Weights are
integers, so the answer does not depend on the order of any sum.

There are three kernels: one weighs the ids below a few fixed keys, one copies the keys between the
two fixed keys that enclose the answer (few, unless the row is flat), one searches among the copies.
Source: pivot searches as in FlashInfer's sampling (arXiv:2501.01005); the fixed point, the copies
and the exact agreement with a sort are ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.columns import SamplingColumns
from kernels.sampling.fixed_point import MASS_SCALE
from kernels.sampling.noise.triton_kernel import scale
from kernels.sampling.tuning import ROW_COLUMNS, ROWS_PER_SEARCH, Cut

COARSE_WAYS = 4
FINE_WAYS = 8
"""Numbers of keys weighed at a time: fixed ones, and ones that cut the rest into even parts."""

_BEYOND = tl.constexpr(0x7F800000)
"""Key of -infinity, for ids that are not kept."""

_FIRST_COARSE = tl.constexpr(128)
"""Exponent bits of 2.0: the fixed keys are those of 2, 4, 8 and 16 below the best."""

_MASS_SCALE = tl.constexpr(MASS_SCALE)
_TOP_P_SLACK = tl.constexpr(reference.TOP_P_SLACK)


def raise_thresholds(
    logits: Tensor,
    columns: SamplingColumns,
    best: Tensor,
    lowest: Tensor,
    cut: Cut,
    *,
    by_mass: bool,
) -> None:
    """
    Apply top_k or top_p to the ids kept so far, in place.

    Args:
        logits: Floating ``[R, V]``, column stride 1.
        columns: Parameters of each row, on the device of the logits.
        best: float32 ``[R]``, the largest logits; rows where it is not finite are left alone.
        lowest: float32 ``[R]``, smallest scaled logit that is kept; raised in place.
        cut: Cut of the ids.
        by_mass: True applies top_p, to the ids left by top_k; False applies top_k.
    """
    num_rows, vocab_size = logits.shape
    room = min(num_rows, ROWS_PER_SEARCH)
    keys = torch.empty((room, vocab_size), dtype=torch.int32, device=logits.device)
    count = torch.empty(room, dtype=torch.int32, device=logits.device)
    weight = torch.empty(
        (room, cut.num_splits, 2 * COARSE_WAYS), dtype=torch.int64, device=logits.device
    )
    for first in range(0, num_rows, ROWS_PER_SEARCH):
        part = slice(first, first + ROWS_PER_SEARCH)
        rows = logits[part]
        row = (
            columns.temperature[part],
            columns.top_k[part],
            columns.top_p[part],
            best[part],
            lowest[part],
        )
        sizes = {
            "VOCAB": vocab_size,
            "BY_MASS": by_mass,
            "NUM_SPLITS": cut.num_splits,
            "SPLITS_2": cut.padded_splits,
            "WAYS": COARSE_WAYS,
        }
        grid = (len(rows), cut.num_splits)
        tiles = {"SPLIT": cut.split, "TILE": cut.tile, "num_warps": cut.num_warps}
        _weigh_kernel[grid](rows, *row, weight, count, rows.stride(0), **sizes, **tiles)
        _collect_kernel[grid](rows, *row, weight, keys, count, rows.stride(0), **sizes, **tiles)
        _search_kernel[(len(rows),)](
            *row, weight, keys, count, **sizes, FINE=FINE_WAYS, TILE=cut.tile, num_warps=8
        )


@triton.jit
def _key_of(scaled: tl.tensor, lowest: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the keys of scaled logits, `_BEYOND` for ids that are outside or not kept."""
    kept = inside & (scaled >= lowest) & (scaled > float("-inf"))
    return tl.where(kept, tl.abs(scaled).to(tl.int32, bitcast=True), _BEYOND)


@triton.jit
def _keys_from(
    row_logits: tl.tensor,
    first: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    lowest: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Compute the keys of a row's ids first to first + TILE."""
    ids = first + tl.arange(0, TILE)
    inside = ids < VOCAB
    values = tl.load(row_logits + ids, mask=inside, other=0.0)
    return _key_of(scale(values.to(tl.float32), best, temperature), lowest, inside)


@triton.jit
def _scaled_of(key: tl.tensor) -> tl.tensor:
    """Return the scaled logit, at most 0, that has a key."""
    return -(key.to(tl.float32, bitcast=True))


@triton.jit
def _weight_of(key: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """Return the weights of keys, int64; 0 for keys of -infinity."""
    if BY_MASS:
        return (tl.exp(_scaled_of(key)) * _MASS_SCALE).to(tl.int64)
    return (key < _BEYOND).to(tl.int64)


@triton.jit
def _is_wanted(
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """Return whether a row is drawn with noise and has the cut: top_p if BY_MASS, else top_k."""
    noisy = (temperature > 0) & (top_k != 1) & (best > float("-inf")) & (best < float("inf"))
    if BY_MASS:
        return noisy & (top_p < 1)
    return noisy & (top_k > 0) & (top_k < VOCAB)


@triton.jit
def _coarse_edges(WAYS: tl.constexpr) -> tl.tensor:
    """Return the fixed keys, int32 [WAYS], ascending."""
    return (_FIRST_COARSE + tl.arange(0, WAYS)) << 23


@triton.jit
def _narrow(
    low: tl.tensor,
    high: tl.tensor,
    below: tl.tensor,
    edges: tl.tensor,
    reached: tl.tensor,
    goal: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Narrow [low, high) to the part between two neighbouring edges that holds the answer.

    `reached` is the weight of all keys below each edge, `below` the weight of all keys below `low`.
    """
    short = reached < goal
    low = tl.maximum(low, tl.max(tl.where(short, edges, 0), axis=0))
    high = tl.minimum(high, tl.min(tl.where(short, _BEYOND, edges), axis=0))
    return low, high, tl.maximum(below, tl.max(tl.where(short, reached, 0), axis=0))


@triton.jit
def _coarse_bracket(
    weight: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    BY_MASS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    WAYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Read a row's result of the first kernel: low, high, weight below low, goal, total weight."""
    split = tl.arange(0, SPLITS_2)
    at = split[:, None] * (2 * WAYS) + tl.arange(0, WAYS)[None, :]
    known = (split < NUM_SPLITS)[:, None] & (tl.arange(0, WAYS) >= 0)[None, :]
    reached = tl.sum(tl.load(weight + at, mask=known, other=0), axis=0)
    totals = tl.load(weight + split * (2 * WAYS) + WAYS, mask=split < NUM_SPLITS, other=0)
    total = tl.sum(totals, axis=0)
    if BY_MASS:
        share = top_p.to(tl.float64) - _TOP_P_SLACK
        goal = tl.ceil(share * total.to(tl.float64)).to(tl.int64)
    else:
        goal = top_k.to(tl.int64)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32) + _BEYOND
    none = tl.full((), 0, tl.int64)
    low, high, below = _narrow(low, high, none, _coarse_edges(WAYS), reached, goal)
    return low, high, below, goal, total


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _weigh_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    best: tl.tensor,
    lowest: tl.tensor,
    weight: tl.tensor,
    count: tl.tensor,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    BY_MASS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,  # noqa: ARG001  # all three kernels take the same sizes
    WAYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Weigh the keys of a split: below each coarse edge in weight[r, s, :WAYS], all in
    weight[r, s, WAYS]; set count[r] to 0. The weights of rows without the cut are left alone.

    Grid (R, NUM_SPLITS). logits [R, VOCAB] fp32|bf16|fp16, column stride 1; row columns, best and
    lowest [R]; weight int64 [R, NUM_SPLITS, 2 * WAYS]; count int32 [R]. Ids >= VOCAB are masked.
    Offsets int64; integer sums, the same in any order.
    Oracle: `reference.keep`, together with `_search_kernel`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p, peak = tl.load(top_k + row), tl.load(top_p + row), tl.load(best + row)
    heat, floor = tl.load(temperature + row), tl.load(lowest + row)
    if split == 0:
        tl.store(count + row, 0)
    if _is_wanted(peak, heat, k, p, VOCAB, BY_MASS):
        edges = _coarse_edges(WAYS)
        reached = tl.zeros((WAYS, TILE), tl.int64)
        total = tl.zeros((TILE,), tl.int64)
        for start in range(0, SPLIT, TILE):
            first = split * SPLIT + start
            key = _keys_from(logits + row * row_stride, first, peak, heat, floor, VOCAB, TILE)
            # This comparison stands before the weight: behind it Triton 3.7 does not compile, as it
            # converts the keys' layout only after the weight that needs it.
            under = key[None, :] < edges[:, None]
            mine = _weight_of(key, BY_MASS)
            reached += tl.where(under, mine[None, :], 0)
            total += mine
        out = weight + (row * NUM_SPLITS + split) * (2 * WAYS)
        tl.store(out + tl.arange(0, WAYS), tl.sum(reached, axis=1))
        tl.store(out + WAYS, tl.sum(total, axis=0))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _collect_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    best: tl.tensor,
    lowest: tl.tensor,
    weight: tl.tensor,
    keys: tl.tensor,
    count: tl.tensor,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    BY_MASS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    WAYS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Copy a row's keys between the coarse edges that enclose the answer to keys[r, :count[r]], in any
    order; rows without the cut are left alone.

    Grid (R, NUM_SPLITS). logits and row columns as in `_weigh_kernel`, weight as it leaves it; keys
    int32 [R, VOCAB], count int32 [R], 0 before. Ids >= VOCAB are masked. Offsets int64.
    Oracle: `reference.keep`, together with `_search_kernel`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p, peak = tl.load(top_k + row), tl.load(top_p + row), tl.load(best + row)
    heat, floor = tl.load(temperature + row), tl.load(lowest + row)
    if _is_wanted(peak, heat, k, p, VOCAB, BY_MASS):
        low, high, _below, _goal, _total = _coarse_bracket(
            weight + row * NUM_SPLITS * (2 * WAYS), k, p, BY_MASS, NUM_SPLITS, SPLITS_2, WAYS
        )
        for start in range(0, SPLIT, TILE):
            first = split * SPLIT + start
            key = _keys_from(logits + row * row_stride, first, peak, heat, floor, VOCAB, TILE)
            open_ = (key >= low) & (key < high)
            num_open = tl.sum(open_.to(tl.int32), axis=0)
            if num_open > 0:
                taken = tl.atomic_add(count + row, num_open)
                place = taken + tl.cumsum(open_.to(tl.int32), axis=0) - 1
                tl.store(keys + row * VOCAB + place, key, mask=open_)


@triton.jit
def _even_edges(low: tl.tensor, high: tl.tensor, FINE: tl.constexpr) -> tl.tensor:
    """Return keys that cut [low, high) into FINE + 1 parts; beyond `high` if that is short."""
    return low + (tl.arange(0, FINE) + 1) * ((high - low + FINE) // (FINE + 1))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _search_kernel(
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    best: tl.tensor,
    lowest: tl.tensor,
    weight: tl.tensor,
    keys: tl.tensor,
    count: tl.tensor,
    VOCAB: tl.constexpr,
    BY_MASS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    WAYS: tl.constexpr,
    FINE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """
    Raise lowest[r] to the scaled logit of the answer; rows without the cut, and those with less
    weight than the goal, are left alone.

    Grid (R,). weight, keys and count as `_collect_kernel` leaves them; keys [R, VOCAB] is
    overwritten: each round keeps the open ones, in place, until TILE fit into registers. Places >=
    count[r] are masked. Offsets int64; integer sums.
    Oracle: `reference.keep`.
    """
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if _is_wanted(tl.load(best + row), tl.load(temperature + row), k, p, VOCAB, BY_MASS):
        low, high, below, goal, total = _coarse_bracket(
            weight + row * NUM_SPLITS * (2 * WAYS), k, p, BY_MASS, NUM_SPLITS, SPLITS_2, WAYS
        )
        if total >= goal:
            mine = keys + row * VOCAB
            num_open = tl.load(count + row)
            while (num_open > TILE) & (high - low > 1):
                low, high, below, num_open = _round(
                    mine, num_open, low, high, below, goal, BY_MASS, FINE, TILE
                )
            place = tl.arange(0, TILE)
            key = tl.load(mine + place, mask=place < num_open, other=_BEYOND)
            mass = _weight_of(key, BY_MASS)
            while high - low > 1:
                edges = _even_edges(low, high, FINE)
                open_ = (key >= low)[None, :] & (key[None, :] < edges[:, None])
                reached = below + tl.sum(tl.where(open_, mass[None, :], 0), axis=1)
                low, high, below = _narrow(low, high, below, edges, reached, goal)
            tl.store(lowest + row, _scaled_of(low))


@triton.jit
def _round(
    mine: tl.tensor,
    num_open: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    below: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    FINE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """
    Keep those of a row's first `num_open` keys that lie in [low, high), then narrow that range.

    A tile is written back only to places that have been read: its own and earlier ones.
    """
    edges = _even_edges(low, high, FINE)
    reached = tl.zeros((FINE, TILE), tl.int64)
    num_kept = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # the keys read here were written by other threads of the program
    for start in range(0, num_open, TILE):
        place = start + tl.arange(0, TILE)
        key = tl.load(mine + place, mask=place < num_open, other=_BEYOND)
        open_ = (key >= low) & (key < high)
        weight = tl.where(open_, _weight_of(key, BY_MASS), 0)
        reached += tl.where(key[None, :] < edges[:, None], weight[None, :], 0)
        kept = tl.cumsum(open_.to(tl.int32), axis=0)
        tl.debug_barrier()
        tl.store(mine + num_kept + kept - 1, key, mask=open_)
        num_kept += tl.sum(open_.to(tl.int32), axis=0)
    tl.debug_barrier()
    low, high, below = _narrow(low, high, below, edges, below + tl.sum(reached, axis=1), goal)
    return low, high, below, num_kept
