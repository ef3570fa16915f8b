"""Logprobs from logits that ranks share: each rank sends its best ids and a sum, in one gather."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kernels.sampling.fixed_point import log_of_mass, mass
from kernels.sampling.logprobs.reference import (
    Logprobs,
    TokenScores,
    best_ids,
    ranks,
    rows_per_copy,
)
from kernels.sampling.order import LEAST, order, pack, unpack, value_of
from kernels.sampling.sharded.shard import VocabularyShard
from kernels.transfer import to_device


def logprobs(
    logits: Tensor,
    token: Tensor,
    num_top: Tensor,
    shard: VocabularyShard,
    *,
    best: Tensor,
    ids: Tensor | None = None,
) -> Logprobs:
    """
    Compute the logprobs of the rows that ask for them, of which there is one, by one collective.

    Args:
        logits: This rank's, floating ``[R, width]``, before any edit.
        token: int64 ``[R]``, the drawn tokens.
        num_top: int64 ``[R]`` on the host, number of top ids to report, -1 for a row without
            logprobs.
        shard: This rank's part of the vocabulary.
        best: float32 ``[R]``, the best logits of all ranks.
        ids: int64 ``[R, W]`` on the host, requested ids, -1 after a row's last.
    """
    row = (num_top >= 0).nonzero()[:, 0]
    asked = num_top[row].clamp(max=shard.vocab_size)
    width, here = int(asked.max()), to_device(row, logits.device)
    wanted, best = token[here][:, None], best[here]
    mine = None if ids is None else ids[row]
    if mine is not None:
        wanted = torch.cat([wanted, to_device(mine.clamp(min=0), logits.device)], dim=1)
    parts = []
    for rows, values in _parts(logits, here):
        found = _logits_of(values, wanted[rows], shard)
        parts.append(torch.cat([found, _told(values, best[rows], width, shard)], dim=1))
    gathered = shard.ranks.gather(torch.cat(parts))
    known = value_of(gathered[..., : wanted.shape[1]].amax(dim=0))
    log_sum, top, top_token = _merged(gathered[..., wanted.shape[1] :], best, width)
    told = known - best[:, None] - log_sum
    return Logprobs(
        row=row,
        num_top=asked,
        chosen=told[:, 0],
        top_token=top_token,
        top=top,
        requested_ids=mine,
        requested=None if mine is None else told[:, 1:],
    )


def token_scores(
    logits: Tensor, token: Tensor, num_top: int, shard: VocabularyShard
) -> TokenScores:
    """Score given tokens as in the package's `token_scores`, by two collectives."""
    width = min(num_top, shard.vocab_size)
    best = logits.amax(dim=1).float()
    peaks = order(torch.where(best.isnan(), torch.inf, best))[:, None]
    own = torch.cat([peaks, _logits_of(logits, token[:, None], shard)], dim=1)
    best, logit = value_of(shard.ranks.max(own)).unbind(dim=1)
    before = ranks(logits, token - shard.first, logit) - 1
    row = torch.arange(len(logits), device=logits.device)
    told = [_told(values, best[rows], width, shard) for rows, values in _parts(logits, row)]
    gathered = shard.ranks.gather(torch.cat([before[:, None], torch.cat(told)], dim=1))
    log_sum, top, top_token = _merged(gathered[..., 1:], best, width)
    return TokenScores(
        valid=best.isfinite(),
        chosen=logit - best - log_sum[:, 0],
        rank=gathered[..., 0].sum(dim=0) + 1,
        top_token=top_token,
        top=top,
    )


def _parts(logits: Tensor, row: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some of the rows at a time: their places in `row` and their logits in float32."""
    size = rows_per_copy(logits)
    for first in range(0, len(row), size):
        rows = slice(first, first + size)
        yield rows, logits[row[rows]].float()


def _logits_of(logits: Tensor, ids: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the logits of ids ``[Q, C]`` as ordered integers, `LEAST` for ids elsewhere."""
    place = shard.places_of(ids)
    found = logits.gather(1, place.clamp(max=shard.width - 1)).float()
    return torch.where(place < shard.width, order(found), LEAST)


def _told(values: Tensor, best: Tensor, width: int, shard: VocabularyShard) -> Tensor:
    """Return a rank's mass relative to the best, and its best ids, packed: ``[Q, 1 + width]``."""
    place = best_ids(values, min(width, shard.width))
    packed = pack(values.gather(1, place), place + shard.first)
    packed = functional.pad(packed, (0, width - packed.shape[1]), value=LEAST)
    return torch.cat([mass(values - best[:, None]).sum(dim=1, keepdim=True), packed], dim=1)


def _merged(told: Tensor, best: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Merge what `_told` returned on all ranks, ``[ranks, Q, 1 + width]``: the logarithm of the sum as
    from `reference.totals`, float32 ``[Q, 1]``, logprobs of the top ids, float32 ``[Q, width]``,
    and these ids.
    """
    log_sum = log_of_mass(best[:, None], told[..., :1].sum(dim=0))
    packed = told[..., 1:].movedim(0, 1).flatten(1)
    top, top_token = unpack(packed.topk(width, dim=1).values)
    return log_sum, top - best[:, None] - log_sum, top_token
