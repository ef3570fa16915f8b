"""Drawing of tokens from logits that ranks share, with the tokens of `reference.sample`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits.reference import LogitEdits
from kernels.sampling.logprobs.reference import rows_per_copy
from kernels.sampling.needs import Needs
from kernels.sampling.noise.reference import gumbel, row_words
from kernels.sampling.order import pack, unpack
from kernels.sampling.sharded.edits import edited
from kernels.sampling.sharded.logprobs import logprobs
from kernels.sampling.sharded.margins import margins
from kernels.sampling.sharded.search import Cuts, find_cuts
from kernels.sampling.sharded.shard import VocabularyShard

_NEVER = float("-inf")


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    shard: VocabularyShard,
    *,
    edits: LogitEdits | None = None,
    num_logprobs: Tensor | None = None,
    logprob_ids: Tensor | None = None,
    margin_eps: float | None = None,
) -> Sampled:
    """
    Draw one token per row, the same on all ranks. Arguments are as in the package's `sample`,
    unchecked, but for logits, ``[R, width]``, which are this rank's.
    """
    values = logits.float() if edits is None else edited(logits, edits, shard)
    tells = num_logprobs is not None and bool((num_logprobs >= 0).any())
    peaks = _peaks(values, shard, raw=logits if tells and edits is not None else None)
    needs = Needs.of(columns, shard.vocab_size)
    columns = columns.to(logits.device)
    drawn = _draw(values, columns, needs, shard, peaks)
    margin = None
    if margin_eps is not None:
        gain = reference.noise_gain(edits, len(logits)).to(logits.device)
        margin = _margins(values, drawn, columns, margin_eps * gain, shard) / gain
        margin = torch.where(peaks.valid, margin, 0.0)
    told = None
    if tells and num_logprobs is not None:
        told = logprobs(logits, drawn.token, num_logprobs, shard, best=peaks.raw, ids=logprob_ids)
    return Sampled(token=drawn.token, valid=peaks.valid, margin=margin, logprobs=told)


def draw(
    logits: Tensor, columns: SamplingColumns, needs: Needs, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """
    Draw as in the package's `draw`, the same on all ranks, from this rank's logits ``[R, width]``.
    """
    values = logits.float()
    peaks = _peaks(values, shard)
    return _draw(values, columns, needs, shard, peaks).token, peaks.valid


@dataclass(frozen=True, slots=True)
class _Peaks:
    """
    Best logits of all ranks, ``[R]`` each.

    Attributes:
        best: float32, after edits; +infinity for a row with NaN.
        token: int64, its lowest id.
        raw: float32, before edits.
    """

    best: Tensor
    token: Tensor
    raw: Tensor

    @property
    def valid(self) -> Tensor:
        """bool[R]: rows that can be drawn."""
        return self.best.isfinite()


@dataclass(frozen=True, slots=True)
class _Drawn:
    """
    Tokens int64 ``[R]``, 0 where not valid, and what rows with noise were drawn from: scaled logits
    float32 ``[R, width]`` and cuts.
    """

    token: Tensor
    scaled: Tensor
    cuts: Cuts


def _peaks(values: Tensor, shard: VocabularyShard, raw: Tensor | None = None) -> _Peaks:
    """Find the best of all ranks' logits after edits, and of `raw` if it is given."""
    packed = [_packed_best(part, shard) for part in (values, raw) if part is not None]
    best, token = unpack(shard.ranks.max(torch.stack(packed, dim=1)))
    return _Peaks(best[:, 0], token[:, 0], best[:, -1])


def _packed_best(values: Tensor, shard: VocabularyShard) -> Tensor:
    best, place = values.max(dim=1)
    best = best.float()
    return pack(torch.where(best.isnan(), torch.inf, best), place + shard.first)


def _draw(
    values: Tensor,
    columns: SamplingColumns,
    needs: Needs,
    shard: VocabularyShard,
    peaks: _Peaks,
) -> _Drawn:
    """Draw from edited logits, with columns on their device."""
    token, scaled = peaks.token, values
    none = scaled.new_full((len(scaled),), _NEVER)
    cuts = Cuts(none, none)
    if needs.noise:
        scaled = reference.scale(values, columns.temperature, peaks.best)
        scaled.masked_fill_(~peaks.valid[:, None], 0.0)  # NaN would have no key
        cuts = find_cuts(scaled, columns, needs, shard.ranks)
        packed = _packed_winner(scaled, cuts.lowest, columns, shard)
        token = torch.where(columns.is_greedy, token, unpack(shard.ranks.max(packed))[1])
    return _Drawn(torch.where(peaks.valid, token, 0), scaled, cuts)


def _packed_winner(
    scaled: Tensor, lowest: Tensor, columns: SamplingColumns, shard: VocabularyShard
) -> Tensor:
    """Return a rank's best score among kept ids, and its id: int64 ``[R]``, packed."""
    ids, words = _ids(scaled, shard), _words(columns)
    size, parts = rows_per_copy(scaled), []
    for first in range(0, len(scaled), size):
        rows = slice(first, first + size)
        scores = gumbel(words[:, rows], ids).add_(scaled[rows])
        scores.masked_fill_(scaled[rows] < lowest[rows, None], _NEVER)
        parts.append(_packed_best(scores, shard))
    return torch.cat(parts)


def _margins(
    values: Tensor, drawn: _Drawn, columns: SamplingColumns, eps: Tensor, shard: VocabularyShard
) -> Tensor:
    """Compute margins, float32 ``[R]``, arbitrary where not valid."""
    greedy = columns.is_greedy[:, None]
    scaled = torch.where(greedy, values, drawn.scaled)
    noise = gumbel(_words(columns), _ids(scaled, shard))
    scores = torch.where(greedy, scaled, scaled + noise)
    return margins(scaled, scores, drawn.token, columns, eps, drawn.cuts, shard)


def _words(columns: SamplingColumns) -> Tensor:
    return row_words(columns.seed, columns.position, columns.choice)[:, :, None]


def _ids(values: Tensor, shard: VocabularyShard) -> Tensor:
    return shard.first + torch.arange(shard.width, dtype=torch.int32, device=values.device)
