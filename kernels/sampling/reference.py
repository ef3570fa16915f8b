"""
The definition of sampling in plain torch: sorts and dense arrays, without shortcuts.

`sampler.sample` must give the same tokens; margins, for equality tests, exist only here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits.reference import LogitEdits, Penalties, add_biases, penalised
from kernels.sampling.fixed_point import mass
from kernels.sampling.logprobs.reference import Logprobs, totals
from kernels.sampling.needs import Needs
from kernels.sampling.noise.reference import gumbel, row_words

MIN_TEMPERATURE = 0.01
"""
Smallest temperature above 0; dividing by a smaller one would only amplify rounding.

`tandem.sampling_params` has the same number for requests: kernels know tensors only and never
import it, so it stands here too, and a test compares the two.
"""

TOP_P_SLACK = 1e-6
"""Mass by which a nucleus may fall short of top_p: float32 rounding must not add a token."""

_NEVER = float("-inf")


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

    A greedy row takes its best logit. Any other row keeps a set of ids and takes the best of
    `scaled + noise` over it. Ties go to the lowest id.
    """
    given = logits.float()
    logits = given if edits is None else edit(given, edits)
    columns = columns.to(logits.device)
    best = logits.amax(dim=1)
    valid = best.isfinite()
    usable = torch.where(valid[:, None], logits, 0.0)
    scaled, scores = score(usable, columns)
    cuts = columns.top_k, columns.top_p, columns.min_p
    greedy = columns.is_greedy[:, None]
    kept = torch.where(greedy, usable > _NEVER, keep(scaled, *cuts).mask)
    token = torch.where(valid, torch.where(kept, scores, _NEVER).argmax(dim=1), 0)
    margin = None
    if margin_eps is not None:
        margin = margin_of(given, columns, token, edits, margin_eps)
    told = None if num_logprobs is None else logprobs(given, token, num_logprobs)
    return Sampled(token=token, valid=valid, margin=margin, logprobs=told)


def draw(logits: Tensor, columns: SamplingColumns, needs: Needs) -> tuple[Tensor, Tensor]:
    """Draw as in the package's `draw`; features that rows do not need run without effect."""
    del needs
    sampled = sample(logits, columns)
    return sampled.token, sampled.valid


def edit(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Return the logits after all edits: float32[R, V]."""
    edited = logits.clone()
    if edits.allowed is not None:
        may_draw = torch.ones(logits.shape, dtype=torch.bool)
        may_draw[edits.allowed.row] = False
        may_draw[edits.allowed.row, edits.allowed.token] = True
        edited += torch.where(may_draw, 0.0, _NEVER).to(logits.device)
    if edits.biases is not None:
        add_biases(edited, edits.biases, edits.biases.row)
    if edits.penalties is not None:
        penalties = edits.penalties
        row = penalties.row.to(logits.device)
        seen, counts = count_tokens(penalties, logits.shape[1])
        before = edited[row]
        edited[row] = torch.where(seen, penalised(before, counts, penalties), before)
    return edited


def count_tokens(penalties: Penalties, vocab_size: int) -> tuple[Tensor, Tensor]:
    """
    Return a mask of ids in prompt or output, bool[P, V], and counts of ids in the output,
    float32[P, V].
    """
    prompt_len, history_len = penalties.prompt_len.tolist(), penalties.history_len.tolist()
    in_prompt, in_output = [], []
    for tokens, first, end in zip(penalties.history, prompt_len, history_len, strict=True):
        in_prompt.append(torch.bincount(tokens[:first], minlength=vocab_size))
        in_output.append(torch.bincount(tokens[first:end], minlength=vocab_size))
    counts = torch.stack(in_output)
    return (torch.stack(in_prompt) + counts) > 0, counts.float()


def noise_gain(edits: LogitEdits | None, num_rows: int) -> Tensor:
    """Return the factor by which repetition penalties can widen logits' differences: float32[R]."""
    gain = torch.ones(num_rows)
    if edits is not None and edits.penalties is not None:
        repetition = edits.penalties.repetition
        gain[edits.penalties.row] = torch.maximum(repetition, 1 / repetition)
    return gain


def logprobs(logits: Tensor, token: Tensor, num_top: Tensor) -> Logprobs | None:
    """Compute logprobs as in `logprobs.reference`, by those of all ids and a full sort."""
    row = (num_top >= 0).nonzero()[:, 0]
    if len(row) == 0:
        return None
    here = row.to(logits.device)
    asked = num_top[row].clamp(max=logits.shape[1])
    best, log_sum = totals(logits[here])
    values = logits[here] - best - log_sum
    # order by logits: different logits may have equal probabilities
    order = logits[here].sort(dim=1, descending=True, stable=True).indices
    top_token = order[:, : int(asked.max())]
    return Logprobs(
        row=row,
        num_top=asked,
        chosen=values.gather(1, token[here][:, None])[:, 0],
        top_token=top_token,
        top=values.gather(1, top_token),
    )


def scale(logits: Tensor, temperature: Tensor, best: Tensor | None = None) -> Tensor:
    """
    Compute logits relative to the row's best, divided by the temperature: float32[R, V], at most 0.
    The best, float32[R], is found here if it is not given.

    The difference to the best is taken first: it is exact for near ties and cannot overflow, and
    subtracting a constant per row changes neither probabilities nor the winner.
    """
    best = logits.amax(dim=1) if best is None else best
    return (logits - best[:, None]) / temperature.clamp(min=MIN_TEMPERATURE)[:, None]


def score(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Return scaled logits without and with noise, float32[R, V] each; greedy rows stay as is."""
    greedy = columns.is_greedy[:, None]
    scaled = torch.where(greedy, logits, scale(logits, columns.temperature))
    return scaled, torch.where(greedy, scaled, scaled + noise(columns, logits.shape[1]))


def noise(columns: SamplingColumns, vocab_size: int) -> Tensor:
    """Compute the Gumbel noise of every id: float32[R, V]."""
    words = row_words(columns.seed, columns.position, columns.choice)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=words.device)
    return gumbel(words[:, :, None], ids)


@dataclass(frozen=True, slots=True)
class Kept:
    """
    The set of ids that a row may draw.

    Attributes:
        mask: bool[R, V], ids in the set.
        survives_top_k: bool[R, V], ids left after min_p and top_k.
        mass_above: float64[R, V], mass of strictly better ids as a share of these ids' mass.
    """

    mask: Tensor
    survives_top_k: Tensor
    mass_above: Tensor


def keep(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None) -> Kept:
    """
    Choose each row's set: min_p, then top_k, then top_p over the survivors.

    All cuts are a threshold on the value, so ids that tie at the cut all stay. The nucleus is the
    smallest set of best values with a share of at least top_p.
    """
    vocab_size = scaled.shape[1]
    if min_p is not None:
        scaled = torch.where(scaled < min_p_threshold(min_p)[:, None], _NEVER, scaled)
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


def min_p_threshold(min_p: Tensor) -> Tensor:
    """Return the scaled logit below which an id is dropped, float32[R]; the best has 0."""
    return min_p.log()


def nucleus_mass(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the fixed-point mass that a nucleus must reach, int64[R] as `total`."""
    return ((top_p.double() - TOP_P_SLACK) * total).ceil().to(torch.int64)


def margin_of(
    logits: Tensor,
    columns: SamplingColumns,
    token: Tensor,
    edits: LogitEdits | None,
    eps: float,
) -> Tensor:
    """
    Compute margins of tokens drawn by any implementation: float32[R], 0 where a row is not valid.

    Args:
        logits: Floating[R, V], before edits.
        columns: Parameters of the rows.
        token: int64[R], drawn from the rows.
        edits: Edits of the rows.
        eps: Rounding error of a logit, before a repetition penalty widens it.
    """
    logits = logits.float() if edits is None else edit(logits.float(), edits)
    columns = columns.to(logits.device)
    valid = logits.amax(dim=1).isfinite()
    scaled, scores = score(torch.where(valid[:, None], logits, 0.0), columns)
    gain = noise_gain(edits, len(logits)).to(logits.device)
    margin = margins(scaled, scores, token, columns, eps * gain) / gain
    return torch.where(valid, margin, 0.0)


def margins(
    scaled: Tensor, scores: Tensor, token: Tensor, columns: SamplingColumns, eps: Tensor
) -> Tensor:
    """
    Compute the margin by which each token won, in units of the score: float32[R].

    The margin is the token's score minus the best other score among the ids that are kept or
    within `eps` of being kept; it is 0 if the token is within `eps` of being dropped, and infinity
    if there is no other id. An id is within eps of a cut if its value is less than eps away from
    the nearest value across the cut or from min_p's threshold. For top_p it is so if the mass above
    it is away from top_p by less than eps plus the mass of ids within eps of min_p's threshold.

    Args:
        scaled: float32[R, V].
        scores: float32[R, V].
        token: int64[R].
        columns: Parameters of the rows.
        eps: float32[R].
    """
    winner, eps = token[:, None], eps[:, None]
    noisy = ~columns.is_greedy[:, None]
    kept = keep(scaled, columns.top_k, columns.top_p, columns.min_p)
    mask = torch.where(noisy, kept.mask, scaled > _NEVER)
    worst_kept = torch.where(mask, scaled, torch.inf).amin(dim=1, keepdim=True)
    best_dropped = torch.where(mask, _NEVER, scaled).amax(dim=1, keepdim=True)
    by_min_p, loose_mass = torch.zeros_like(mask), torch.zeros_like(eps)
    if columns.min_p is not None:
        off_by = (scaled - min_p_threshold(columns.min_p)[:, None]).abs()
        by_min_p = noisy & (scaled > _NEVER) & (scaled < 0) & (off_by < eps)
        total = torch.where(kept.survives_top_k, mass(scaled), 0).sum(dim=1, keepdim=True)
        loose_mass = torch.where(by_min_p, mass(scaled), 0).sum(dim=1, keepdim=True) / total
    has_nucleus = noisy & (columns.top_p < 1)[:, None]
    short_by = (kept.mass_above - columns.top_p.double()[:, None]).float().abs()
    by_mass = kept.survives_top_k & has_nucleus & (kept.mass_above > 0)
    by_mass &= short_by < eps + loose_mass
    near = mask | by_min_p | by_mass | ((scaled > worst_kept - eps) & (scaled > _NEVER))
    others = torch.where(near, scores, _NEVER).scatter(1, winner, _NEVER).amax(dim=1)
    lead = scores.gather(1, winner)[:, 0] - others
    shaky = by_min_p | by_mass | (scaled < best_dropped + eps)
    return torch.where(shaky.gather(1, winner)[:, 0], 0.0, lead).clamp(min=0.0)
