"""
The cuts of top_k and top_p over the ids of all ranks, by a search for the threshold in radix
rounds.

Scaled logits are at most 0, so the bits of their absolute value order them, the best first: those
bits are the *key* (as in `kernels.sampling.triton_search`). Each of four rounds finds eight bits of
the threshold's key: every rank weighs its open ids by the next eight bits of their keys, one sum
over ranks adds these histograms up for all rows, and the first bucket in which the weight suffices
stays open. Weights are integers, so the sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.columns import SamplingColumns
from kernels.sampling.fixed_point import mass
from kernels.sampling.logprobs.reference import rows_per_copy
from kernels.sampling.needs import Needs
from kernels.sampling.sharded.shard import Collectives

_BITS = 8
_BUCKETS = 1 << _BITS
_SHIFTS = (24, 16, 8, 0)

_BEYOND = 0x7F800000
"""Key of -infinity, for ids that are not kept."""

_NEVER = float("-inf")

Suffices = Callable[[Tensor, Tensor], Tensor]
"""
Function that tells whether weights suffice: of int64 ``[R, W]`` and of all weight of each row,
int64 ``[R, 1]``, it returns bool ``[R, W]``. What a weight suffices for, a larger one does.
"""


@dataclass(frozen=True, slots=True)
class Cuts:
    """
    Smallest scaled logits that rows may draw, float32 ``[R]`` each.

    Attributes:
        after_top_k: After min_p and top_k.
        lowest: After all cuts.
    """

    after_top_k: Tensor
    lowest: Tensor


def find_cuts(scaled: Tensor, columns: SamplingColumns, needs: Needs, ranks: Collectives) -> Cuts:
    """
    Apply min_p, top_k and top_p as `reference.keep` does, the same on all ranks.

    Args:
        scaled: float32 ``[R, width]``, at most 0; the best of a row, on any rank, is 0.
        columns: Parameters of each row, on the device of `scaled`.
        needs: Cuts to make; two of them take four collectives each.
        ranks: The ranks.
    """
    if needs.min_p and columns.min_p is not None:
        lowest = reference.min_p_threshold(columns.min_p)
    else:
        lowest = scaled.new_full((len(scaled),), _NEVER)
    if needs.top_k:
        k = columns.top_k[:, None]
        key = smallest_key(scaled, lowest, lambda weight, _: weight >= k, ranks, by_mass=False)
        lowest = _raised(lowest, key, columns.top_k > 0)
    after_top_k = lowest
    if needs.top_p:
        top_p = columns.top_p[:, None]
        key = smallest_key(
            scaled,
            lowest,
            lambda weight, total: weight >= reference.nucleus_mass(total, top_p),
            ranks,
            by_mass=True,
        )
        lowest = _raised(lowest, key, columns.top_p < 1)
    return Cuts(after_top_k, lowest)


def keys_of(scaled: Tensor, lowest: Tensor) -> Tensor:
    """Return the keys of scaled logits, int32, `_BEYOND` where below `lowest` or -infinity."""
    kept = (scaled >= lowest[:, None]) & (scaled > _NEVER)
    return torch.where(kept, scaled.abs().view(torch.int32), _BEYOND)


def smallest_key(
    scaled: Tensor, lowest: Tensor, suffices: Suffices, ranks: Collectives, *, by_mass: bool
) -> Tensor:
    """
    Find the smallest key at which the weight of all keys up to it suffices: int64 ``[R]``, above
    every key where all weight does not.

    Args:
        scaled: float32 ``[R, width]``, at most 0.
        lowest: float32 ``[R]``; ids below it have no weight.
        suffices: What is looked for.
        ranks: The ranks.
        by_mass: The weight of an id is its mass; otherwise it is 1.
    """
    keys = keys_of(scaled, lowest)
    found = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
    below = torch.zeros_like(found)
    total: Tensor | None = None
    for shift in _SHIFTS:
        weight = ranks.sum(_histogram(keys, found, shift, by_mass=by_mass))
        reached = below[:, None] + weight.cumsum(dim=1)
        total = reached[:, -1:] if total is None else total
        bucket = (~suffices(reached, total)).sum(dim=1).clamp(max=_BUCKETS - 1)
        before = reached.gather(1, (bucket - 1).clamp(min=0)[:, None])[:, 0]
        below = torch.where(bucket > 0, before, below)
        found = (found << _BITS) + bucket
    return found


def _histogram(keys: Tensor, found: Tensor, shift: int, *, by_mass: bool) -> Tensor:
    """
    Weigh a rank's keys that begin with the bits found so far by their next bits: ``[R, _BUCKETS]``.
    """
    shape, dtype = (len(keys), _BUCKETS), torch.int64 if by_mass else torch.int32
    weights = torch.zeros(shape, dtype=dtype, device=keys.device)
    size = rows_per_copy(keys)
    for first in range(0, len(keys), size):
        rows = slice(first, first + size)
        key = keys[rows]
        leading = key >> shift
        counts = (key < _BEYOND) & ((leading >> _BITS) == found[rows, None])
        weight = mass(-key.view(torch.float32)) if by_mass else 1
        place = (leading & (_BUCKETS - 1)).long()
        weights[rows].scatter_add_(1, place, torch.where(counts, weight, 0).to(dtype))
    return weights


def _raised(lowest: Tensor, key: Tensor, wanted: Tensor) -> Tensor:
    """Raise thresholds to the scaled logits that have these keys, where there is one."""
    scaled = -key.clamp(max=_BEYOND).to(torch.int32).view(torch.float32)
    return torch.maximum(lowest, torch.where(wanted, scaled, _NEVER))
