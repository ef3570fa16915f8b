"""Drawing of tokens on a device as `reference.sample` defines it: few kernels, no sort, no wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.columns import SamplingColumns
from kernels.sampling.needs import Needs
from kernels.sampling.noise.triton_kernel import MAX_SPREAD, gumbel, random_bits, scale
from kernels.sampling.triton_search import raise_thresholds
from kernels.sampling.tuning import ROW_COLUMNS, Cut

__all__ = ["Needs", "draw", "thresholds"]

_NO_ID = tl.constexpr(2**31 - 1)


def draw(
    logits: Tensor, columns: SamplingColumns, needs: Needs, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """
    Draw one token per row, with launches that depend on shapes and `needs` only.

    A graph can capture it: parameters are read on the device, and the host does not wait.

    Args:
        logits: Floating ``[R, V]``, column stride 1. Not changed.
        columns: Parameters of each row, on the device of the logits.
        needs: Needs of the rows, or more.
        cut: Cut of the ids; None takes the table's. It does not change tokens.

    Returns:
        Token int64 ``[R]``, 0 where not valid, and validity bool ``[R]``.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    valid = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return token, valid
    if cut is None:
        cut = Cut.of(num_rows, vocab_size)
    grid = (num_rows, cut.num_splits)
    value = torch.empty(grid, dtype=torch.float32, device=device)
    ids = torch.empty(grid, dtype=torch.int32, device=device)
    best = torch.empty(num_rows, dtype=torch.float32, device=device)
    parts = {"NUM_SPLITS": cut.num_splits, "SPLITS_2": cut.padded_splits}
    tiles = {
        "VOCAB": vocab_size,
        "SPLIT": cut.split,
        "TILE": cut.tile,
        "NUM_SPLITS": cut.num_splits,
        "num_warps": cut.num_warps,
    }
    _best_kernel[grid](logits, value, ids, logits.stride(0), **tiles)
    _greedy_kernel[(num_rows,)](value, ids, token, valid, best, **parts, num_warps=1)
    if needs.noise:
        lowest = thresholds(logits, columns, best, needs, cut)
        row = (columns.temperature, columns.top_k, columns.seed, columns.position, columns.choice)
        _draw_kernel[grid](logits, *row, best, lowest, value, ids, logits.stride(0), **tiles)
        _choose_kernel[(num_rows,)](*row[:2], best, value, ids, token, **parts, num_warps=1)
    return token, valid


def thresholds(
    logits: Tensor, columns: SamplingColumns, best: Tensor, needs: Needs, cut: Cut
) -> Tensor:
    """
    Compute the smallest scaled logit that each row may draw, float32 ``[R]``.

    Args:
        logits: Floating ``[R, V]``, column stride 1.
        columns: Parameters of each row, on the device of the logits.
        best: float32 ``[R]``, the largest logits; a row is not cut if its best is not finite.
        needs: Filters to apply.
        cut: Cut of the ids.
    """
    if needs.min_p and columns.min_p is not None:
        lowest = reference.min_p_threshold(columns.min_p)
    else:
        lowest = torch.full_like(best, float("-inf"))
    if needs.top_k:
        raise_thresholds(logits, columns, best, lowest, cut, by_mass=False)
    if needs.top_p:
        raise_thresholds(logits, columns, best, lowest, cut, by_mass=True)
    return lowest


@triton.jit
def _best_kernel(
    logits: tl.tensor,
    value: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    """
    Write the largest logit of each split of a row and its lowest id; +inf for a split with NaN.

    Grid (R, NUM_SPLITS). logits [R, VOCAB] fp32|bf16|fp16, column stride 1; value fp32 and ids
    int32 [R, NUM_SPLITS], all written; ids >= VOCAB are masked. Offsets int64 (R * VOCAB can pass
    2**31).
    Oracle: `reference.sample` of greedy rows, together with `_greedy_kernel`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.full((TILE,), 0, tl.int32) + _NO_ID
    for start in range(0, SPLIT, TILE):
        here = split * SPLIT + start + tl.arange(0, TILE)
        inside = here < VOCAB
        x = tl.load(logits + row * row_stride + here, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124  # NaN
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, here, best_id)
    top = tl.max(best, axis=0)
    at = row * NUM_SPLITS + split
    tl.store(value + at, top)
    tl.store(ids + at, tl.min(tl.where(best == top, best_id, _NO_ID), axis=0))


@triton.jit
def _row_winner(
    value: tl.tensor,
    ids: tl.tensor,
    row: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest value of all splits of a row and its lowest id."""
    split = tl.arange(0, SPLITS_2)
    known = split < NUM_SPLITS
    at = row * NUM_SPLITS + split
    x = tl.load(value + at, mask=known, other=float("-inf"))
    best = tl.max(x, axis=0)
    candidate = tl.load(ids + at, mask=known, other=_NO_ID)
    return best, tl.min(tl.where(x == best, candidate, _NO_ID), axis=0)


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _greedy_kernel(
    value: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    best: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
) -> None:
    """
    Merge a row's splits: best[r] is its largest logit, valid[r] whether that is finite, token[r]
    its lowest id, 0 if not valid.

    Grid (R,). value fp32, ids int32 [R, NUM_SPLITS] as from `_best_kernel`; best fp32, valid bool,
    token int64 [R], all written. SPLITS_2 is a power of two; splits >= NUM_SPLITS are masked.
    Offsets int64.
    Oracle: `reference.sample` of greedy rows.
    """
    row = tl.program_id(0).to(tl.int64)
    top, winner = _row_winner(value, ids, row, NUM_SPLITS, SPLITS_2)
    finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(best + row, top)
    tl.store(valid + row, finite)
    tl.store(token + row, tl.where(finite, winner, 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _draw_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    choice: tl.tensor,
    best: tl.tensor,
    lowest: tl.tensor,
    value: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.int64,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    """
    Write the largest sum of scaled logit and noise among the kept ids of each split, and its lowest
    id; those of rows that are greedy or not valid are left alone.

    Grid (R, NUM_SPLITS). Shapes as in `_best_kernel`; row columns [R] as in SamplingColumns; best,
    lowest fp32 [R]. Ids >= VOCAB or below lowest are masked; a tile without an id that could win
    gets no noise, which is most of the work. Offsets int64; scores fp32.
    Oracle: `reference.sample`, together with `_choose_kernel`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, heat = tl.load(best + row), tl.load(temperature + row)
    noisy = (heat > 0) & (tl.load(top_k + row) != 1)
    if noisy & (peak > float("-inf")) & (peak < float("inf")):
        floor = tl.load(lowest + row)
        key, place, draw = tl.load(seed + row), tl.load(position + row), tl.load(choice + row)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        top_id = tl.full((TILE,), 0, tl.int32) + _NO_ID
        for start in range(0, SPLIT, TILE):
            here = split * SPLIT + start + tl.arange(0, TILE)
            inside = here < VOCAB
            x = tl.load(logits + row * row_stride + here, mask=inside, other=float("-inf"))
            scaled = scale(x.to(tl.float32), peak, heat)
            can_win = inside & (scaled >= floor) & (scaled > -MAX_SPREAD)
            if tl.max(can_win.to(tl.int32), axis=0) > 0:
                score = scaled + gumbel(random_bits(key, place, draw, here))
                better = can_win & (score > top)
                top = tl.where(better, score, top)
                top_id = tl.where(better, here, top_id)
        winner = tl.max(top, axis=0)
        at = row * NUM_SPLITS + split
        tl.store(value + at, winner)
        tl.store(ids + at, tl.min(tl.where(top == winner, top_id, _NO_ID), axis=0))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _choose_kernel(
    temperature: tl.tensor,
    top_k: tl.tensor,
    best: tl.tensor,
    value: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
) -> None:
    """
    Merge the splits of rows that `_draw_kernel` drew: token[r] is the lowest id with the best
    score. Tokens of rows that are greedy or not valid are left alone.

    Grid (R,). temperature fp32, top_k int32, best fp32, token int64 [R]; value fp32, ids int32
    [R, NUM_SPLITS] as from `_draw_kernel`. Splits >= NUM_SPLITS are masked. Offsets int64.
    Oracle: `reference.sample`.
    """
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(best + row)
    noisy = (tl.load(temperature + row) > 0) & (tl.load(top_k + row) != 1)
    if noisy & (peak > float("-inf")) & (peak < float("inf")):
        _, winner = _row_winner(value, ids, row, NUM_SPLITS, SPLITS_2)
        tl.store(token + row, winner.to(tl.int64))
