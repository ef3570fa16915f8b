"""Margins of tokens drawn from logits that ranks share; seven collectives, for equality tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.columns import SamplingColumns
from kernels.sampling.fixed_point import mass
from kernels.sampling.order import LEAST, order, value_of
from kernels.sampling.sharded.search import Cuts, keys_of, smallest_key
from kernels.sampling.sharded.shard import VocabularyShard

_NEVER = float("-inf")


def margins(
    scaled: Tensor,
    scores: Tensor,
    token: Tensor,
    columns: SamplingColumns,
    eps: Tensor,
    cuts: Cuts,
    shard: VocabularyShard,
) -> Tensor:
    """
    Compute `reference.margins`, the same on all ranks: float32 ``[R]``.

    Args:
        scaled: float32 ``[R, width]``, this rank's; greedy rows are not scaled.
        scores: float32 ``[R, width]``, this rank's.
        token: int64 ``[R]``.
        columns: Parameters of the rows.
        eps: float32 ``[R]``.
        cuts: What the rows may draw.
        shard: This rank's part of the vocabulary.
    """
    finite, noisy, eps = scaled > _NEVER, ~columns.is_greedy[:, None], eps[:, None]
    kept = finite & (~noisy | (scaled >= cuts.lowest[:, None]))
    survives = finite & noisy & (scaled >= cuts.after_top_k[:, None])
    by_min_p = torch.zeros_like(kept)
    if columns.min_p is not None:
        off_by = (scaled - reference.min_p_threshold(columns.min_p)[:, None]).abs()
        by_min_p = noisy & finite & (scaled < 0) & (off_by < eps)
    at_most_0 = scaled.clamp(max=0.0)  # greedy rows are not weighed
    weight = [torch.where(part, mass(at_most_0), 0).sum(dim=1) for part in (survives, by_min_p)]
    total, loose = shard.ranks.sum(torch.stack(weight)).unsqueeze(2)
    span = eps + torch.where(noisy, loose / total.clamp(min=1), 0.0)
    by_mass = survives & _near_top_p(at_most_0, columns.top_p, span, cuts.after_top_k, shard)
    worst_kept, best_dropped = _bounds(scaled, kept, shard)
    near = kept | by_min_p | by_mass | ((scaled > worst_kept - eps) & finite)
    shaky = by_min_p | by_mass | (scaled < best_dropped + eps)
    return _lead(scores, near, shaky, token, shard)


def _near_top_p(
    scaled: Tensor, top_p: Tensor, span: Tensor, lowest: Tensor, shard: VocabularyShard
) -> Tensor:
    """
    Find the ids above which the mass is away from top_p by less than `span`: bool ``[R, width]``.
    They lie between two keys, which are searched for together; the best is not among them.
    """
    num_rows = len(scaled)
    share = top_p.double()[:, None].repeat(2, 1)
    sides = torch.cat([span.nextafter(torch.zeros_like(span)).neg(), span])

    def suffices(weight: Tensor, total: Tensor) -> Tensor:
        return (weight.double() / total - share).float() >= sides

    twice = scaled.repeat(2, 1), lowest.repeat(2)
    found = smallest_key(*twice, suffices, shard.ranks, by_mass=True)
    low, high = found[:num_rows], found[num_rows:]
    key = keys_of(scaled, lowest)
    between: Tensor = (key > low[:, None]) & (key <= high[:, None])
    return between & (top_p < 1)[:, None]


def _bounds(scaled: Tensor, kept: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the worst value that is kept, and the best that is not: float32 ``[R, 1]`` each."""
    worst = torch.where(kept, -scaled, _NEVER).amax(dim=1)
    dropped = torch.where(kept, _NEVER, scaled).amax(dim=1)
    found = value_of(shard.ranks.max(order(torch.stack([worst, dropped], dim=1))))
    return -found[:, :1], found[:, 1:]


def _lead(
    scores: Tensor, near: Tensor, shaky: Tensor, token: Tensor, shard: VocabularyShard
) -> Tensor:
    """
    Return each token's score minus the best other one that is near, 0 where the token is shaky.
    """
    place = shard.places_of(token)[:, None]
    here, place = place < shard.width, place.clamp(max=shard.width - 1)
    others = torch.where(near, scores, _NEVER)
    other = others.scatter(1, place, torch.where(here, _NEVER, others.gather(1, place)))
    own = torch.cat(
        [
            order(other.amax(dim=1, keepdim=True)),
            torch.where(here, order(scores.gather(1, place)), LEAST),
            (here & shaky.gather(1, place)).long(),
        ],
        dim=1,
    )
    best_other, score, is_shaky = shard.ranks.max(own).unbind(dim=1)
    lead = value_of(score) - value_of(best_other)
    return torch.where(is_shaky > 0, 0.0, lead).clamp(min=0.0)
