"""
The definition of sampling in plain torch: sorts and dense arrays, no short cut.

`sampler.sample` must give the same tokens; margins, a tool of equality tests, exist only here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.noise import gumbel, row_words

MIN_TEMPERATURE = 0.01
"""Below this, and above 0, dividing by the temperature would only amplify rounding."""

TOP_P_SLACK = 1e-6
"""Mass by which a nucleus may fall short of top_p: float32 rounding must not add a token."""

_MASS_SCALE = 2.0**40
_NEVER = float("-inf")


def sample(logits: Tensor, columns: SamplingColumns, *, margin_eps: float | None = None) -> Sampled:
    """
    Draw one token per row; see the package for arguments.

    A greedy row takes its best logit. Any other row keeps a set of ids and takes the best of
    `scaled + noise` over it. Ties go to the lowest id.
    """
    logits = logits.float()
    columns = columns.to(logits.device)
    best = logits.amax(dim=1)
    valid = best.isfinite()
    usable = torch.where(valid[:, None], logits, 0.0)
    greedy = columns.is_greedy[:, None]
    scaled = torch.where(greedy, usable, scale(usable, columns.temperature))
    kept = torch.where(greedy, usable > _NEVER, keep(scaled, columns.top_k, columns.top_p).mask)
    scores = torch.where(greedy, scaled, scaled + noise(columns, logits.shape[1]))
    token = torch.where(kept, scores, _NEVER).argmax(dim=1)
    margin = None
    if margin_eps is not None:
        margin = torch.where(valid, margins(scaled, scores, token, columns, margin_eps), 0.0)
    return Sampled(token=torch.where(valid, token, 0), valid=valid, margin=margin)


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """
    Logits relative to the row's best, divided by the temperature: float32[R, V], at most 0.

    The difference to the best is taken first: it is exact for near ties, cannot overflow, and a
    constant per row changes neither probabilities nor the winner.
    """
    best = logits.amax(dim=1, keepdim=True)
    return (logits - best) / temperature.clamp(min=MIN_TEMPERATURE)[:, None]


def noise(columns: SamplingColumns, vocab_size: int) -> Tensor:
    """Gumbel noise of every id: float32[R, V]."""
    words = row_words(columns.seed, columns.position, columns.choice)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=words.device)
    return gumbel(words[:, :, None], ids)


def mass(scaled: Tensor) -> Tensor:
    """
    Unnormalised probabilities as int64 fixed point with 40 binary places.

    Sums of integers are exact, so a nucleus does not depend on the order or shape of a reduction.
    """
    return (scaled.exp() * _MASS_SCALE).to(torch.int64)


@dataclass(frozen=True, slots=True)
class Kept:
    """
    The set of ids a row may draw.

    Attributes:
        mask: bool[R, V].
        survives_top_k: bool[R, V].
        mass_above: float64[R, V]: share, of what survives top_k, of the ids strictly better.
    """

    mask: Tensor
    survives_top_k: Tensor
    mass_above: Tensor


def keep(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Kept:
    """
    Choose each row's set: top_k, then top_p over its survivors.

    Both cuts are a threshold on the value, so ids that tie at the cut all stay. The nucleus is the
    smallest set of best values whose share is at least top_p.
    """
    vocab_size = scaled.shape[1]
    order = scaled.argsort(dim=1, descending=True)
    ordered = scaled.gather(1, order)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()[:, None]
    survives = (scaled >= ordered.gather(1, k - 1)) & (scaled > _NEVER)
    weight = torch.where(survives, mass(scaled), 0)
    ordered_weight = weight.gather(1, order)
    before = ordered_weight.cumsum(dim=1) - ordered_weight
    # every id of a tie sees the mass before the tie's first one
    first_of_tie = torch.searchsorted(-ordered, -scaled.contiguous())
    above = before.gather(1, first_of_tie)
    total = weight.sum(dim=1)
    in_nucleus = (above < nucleus_mass(total, top_p)[:, None]) | (scaled == ordered[:, :1])
    in_nucleus |= (top_p >= 1)[:, None]
    return Kept(survives & in_nucleus, survives, above.double() / total[:, None])


def nucleus_mass(total: Tensor, top_p: Tensor) -> Tensor:
    """Fixed-point mass a nucleus must reach, int64[R] as `total`."""
    return ((top_p.double() - TOP_P_SLACK) * total).ceil().to(torch.int64)


def margins(
    scaled: Tensor, scores: Tensor, token: Tensor, columns: SamplingColumns, eps: float
) -> Tensor:
    """
    By how much each token won, in units of the score: float32[R].

    Best score minus the best other score among the ids that are kept or within `eps` of being
    kept; 0 if the winner is within `eps` of being dropped; infinity if there is no other. An id is
    within eps of a cut if its value is less than eps away from the nearest one across it or, for
    top_p, if the mass above it is less than eps away from top_p.
    """
    winner = token[:, None]
    greedy = columns.is_greedy[:, None]
    kept = keep(scaled, columns.top_k, columns.top_p)
    mask = torch.where(greedy, scaled > _NEVER, kept.mask)
    worst_kept = torch.where(mask, scaled, torch.inf).amin(dim=1, keepdim=True)
    best_dropped = torch.where(mask, _NEVER, scaled).amax(dim=1, keepdim=True)
    off_by = (kept.mass_above - columns.top_p.double()[:, None]).float()
    has_nucleus = ~greedy & (columns.top_p < 1)[:, None]
    by_mass = kept.survives_top_k & has_nucleus & (kept.mass_above > 0) & (off_by.abs() < eps)
    near = mask | by_mass | ((scaled > worst_kept - eps) & (scaled > _NEVER))
    others = torch.where(near, scores, _NEVER).scatter(1, winner, _NEVER).amax(dim=1)
    lead = scores.gather(1, winner)[:, 0] - others
    shaky = by_mass | (scaled < best_dropped + eps)
    return torch.where(shaky.gather(1, winner)[:, 0], 0.0, lead).clamp(min=0.0)
