"""A fast implementation of `reference.sample` in PyTorch, with the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits.reference import LogitEdits
from kernels.sampling.filters import cut
from kernels.sampling.logprobs.reference import logprobs, rows_per_copy
from kernels.sampling.noise.reference import MAX_SPREAD, gumbel, row_words

_TILE_ELEMENTS = 1 << 15
"""Number of logits of a tile on a CPU: they fit the cache, and torch wakes no other threads."""

_BEST_TILE = 1024
"""
Number of ids in a tile: the largest logit of each tile is found first, and its place only in the
best tile, because a CPU finds values with vector instructions, but places one by one.
"""

_SPARSE_SHARE = 4
"""Fraction of ids, one in so many, below which only the ids that can win get noise."""


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    *,
    edits: LogitEdits | None = None,
    num_logprobs: Tensor | None = None,
    margin_eps: float | None = None,
) -> Sampled:
    """
    Draw one token per row; arguments are as in the package's `sample`, unchecked.

    Greedy rows cost one pass. The others are computed in tiles of rows: they are cut, and ids that
    can still win get noise. A row's arithmetic does not depend on its tile. Only edited rows are
    copied.
    """
    if margin_eps is not None:
        return reference.sample(
            logits, columns, edits=edits, num_logprobs=num_logprobs, margin_eps=margin_eps
        )
    edited = None if edits is None else edits.rows
    noisy = ~columns.is_greedy
    if edited is not None:
        noisy[edited] = False
    best, token = _best(logits)
    valid = best.isfinite()
    num_noisy = int(noisy.count_nonzero())
    if num_noisy == len(noisy):
        token = _drawn(logits, columns)
    elif num_noisy > 0:
        rows = noisy.nonzero()[:, 0]
        here = rows.to(logits.device)
        token[here] = _drawn(logits[here], columns.select(rows))
    if edits is not None and edited is not None:
        for rows in torch.split(edited, rows_per_copy(logits)):
            here = rows.to(logits.device)
            changed = logits[here].float()
            edits.apply(changed, rows)
            drawn = sample(changed, columns.select(rows))
            token[here], valid[here] = drawn.token, drawn.valid
    token = torch.where(valid, token, 0)
    told = None if num_logprobs is None else logprobs(logits, token, num_logprobs)
    return Sampled(token=token, valid=valid, logprobs=told)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, NaN if it has one, and its lowest id."""
    num_tiles = logits.shape[1] // _BEST_TILE
    if logits.device.type != "cpu" or num_tiles < 2 or logits.stride(1) != 1:
        best, token = logits.max(dim=1)
        return best, token
    end = num_tiles * _BEST_TILE
    tiles = logits[:, :end].view(len(logits), num_tiles, _BEST_TILE)
    best, tile = tiles.amax(dim=2).max(dim=1)
    own_tile = tiles[torch.arange(len(logits)), tile]
    token = tile * _BEST_TILE + own_tile.max(dim=1).indices
    if end < logits.shape[1]:
        last, place = logits[:, end:].max(dim=1)
        token = torch.where(last > best, place + end, token)
        best = torch.maximum(best, last)
    return best, token


def _drawn(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Draw the tokens of rows that all need noise, int64[R]; arbitrary where a row is not valid."""
    words = row_words(columns.seed, columns.position, columns.choice).to(logits.device)
    num_rows, tile = len(logits), _rows_per_tile(logits)
    if num_rows <= tile:
        return _draw_tile(logits, columns, words)
    tiles = [slice(first, first + tile) for first in range(0, num_rows, tile)]
    return torch.cat(
        [_draw_tile(logits[rows], columns.select(rows), words[:, rows]) for rows in tiles]
    )


def _rows_per_tile(logits: Tensor) -> int:
    num_rows, vocab_size = logits.shape
    if logits.device.type != "cpu":
        return max(num_rows, 1)
    return max(1, _TILE_ELEMENTS // vocab_size)


def _draw_tile(logits: Tensor, columns: SamplingColumns, words: Tensor) -> Tensor:
    scaled = reference.scale(logits.float(), columns.temperature.to(logits.device))
    cut(scaled, columns.top_k, columns.top_p, columns.min_p)
    if scaled.device.type == "cpu":
        can_win = scaled > -MAX_SPREAD
        if int(can_win.count_nonzero()) * _SPARSE_SHARE < scaled.numel():
            return _best_of_few(scaled, can_win, words)
    return _best_of_all(scaled, words)


def _best_of_all(scaled: Tensor, words: Tensor) -> Tensor:
    ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    return gumbel(words[:, :, None], ids).add_(scaled).argmax(dim=1)


def _best_of_few(scaled: Tensor, can_win: Tensor, words: Tensor) -> Tensor:
    num_rows, vocab_size = scaled.shape
    row, token = can_win.nonzero(as_tuple=True)
    scores = gumbel(words[:, row], token.to(torch.int32)).add_(scaled[row, token])
    best = scaled.new_full((num_rows,), float("-inf")).scatter_reduce_(0, row, scores, "amax")
    wins = scores == best[row]
    lowest = torch.full((num_rows,), vocab_size, device=scaled.device)
    return lowest.scatter_reduce_(0, row[wins], token[wins], "amin")
