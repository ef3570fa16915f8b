"""The cuts of min_p, top_k and top_p, without a full sort if a few of the best values suffice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.fixed_point import mass
from kernels.sampling.reference import min_p_threshold, nucleus_mass

_PREFIXES = (64, 512)
"""
Numbers of best values to try before sorting all: a trained model's nucleus rarely needs the second.
"""

_PREFIX_GAIN = 32
"""Ratio of vocabulary to prefix from which a prefix is worth trying."""

_NEVER = float("-inf")


def cut(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None) -> None:
    """
    Set every id outside its row's kept set to -infinity, in place; see `reference.keep`.

    Args:
        scaled: float32[R, V], at most 0; the best value of a row is 0.
        top_k: int32[R], on any device.
        top_p: float32[R], on any device.
        min_p: float32[R], on any device, or None.
    """
    vocab_size = scaled.shape[1]
    if min_p is not None:
        for rows, part in _parts(scaled, min_p > 0):
            threshold = min_p_threshold(min_p[rows]).to(part.device)
            _drop_below(scaled, rows, part, threshold[:, None])
    for rows, part in _parts(scaled, (top_k > 0) & (top_k < vocab_size)):
        k = top_k[rows]
        largest = part.topk(int(k.max()), dim=1).values
        threshold = largest.gather(1, k.to(part.device).long()[:, None] - 1)
        _drop_below(scaled, rows, part, threshold)
    # a device sorts faster than it could report whether a prefix was enough
    prefixes = _PREFIXES if scaled.device.type == "cpu" else ()
    sizes = [*(size for size in prefixes if size * _PREFIX_GAIN <= vocab_size), vocab_size]
    for rows, part in _parts(scaled, top_p < 1):
        target = nucleus_mass(mass(part).sum(dim=1), top_p[rows].to(part.device))
        _drop_below(scaled, rows, part, _nucleus_threshold(part, target, sizes)[:, None])


def _parts(scaled: Tensor, wanted: Tensor) -> list[tuple[Tensor | slice, Tensor]]:
    """Return the wanted rows as one part, not copied if all are; no part if there are none."""
    num_wanted = int(wanted.count_nonzero())
    if num_wanted == 0:
        return []
    if num_wanted == len(wanted):
        return [(slice(None), scaled)]
    rows = wanted.nonzero()[:, 0]
    return [(rows, scaled[rows.to(scaled.device)])]


def _drop_below(scaled: Tensor, rows: Tensor | slice, part: Tensor, threshold: Tensor) -> None:
    part.masked_fill_(part < threshold, _NEVER)
    if isinstance(rows, Tensor):
        scaled[rows.to(scaled.device)] = part


def _nucleus_threshold(scaled: Tensor, target: Tensor, sizes: Sequence[int]) -> Tensor:
    """
    Find the smallest value in each row's nucleus: float32[R].

    Args:
        scaled: float32[R, V].
        target: int64[R], mass to reach.
        sizes: Numbers of best values to try, in order; the last is V.
    """
    size, *larger = sizes
    ordered = _best(scaled, size)
    weight = mass(ordered)
    reached = weight.cumsum(dim=1)
    count = (reached - weight < target[:, None]).sum(dim=1, keepdim=True).clamp_(min=1)
    threshold = ordered.gather(1, count - 1)[:, 0]
    if larger:
        undecided = (reached[:, -1] < target).nonzero()[:, 0]
        if len(undecided):
            threshold[undecided] = _nucleus_threshold(scaled[undecided], target[undecided], larger)
    return threshold


def _best(scaled: Tensor, size: int) -> Tensor:
    """Return the best values of each row, best first: float32[R, size]."""
    if size == scaled.shape[1] and scaled.device.type == "cpu":
        # NumPy sorts values alone with vector instructions: 6 times as fast as torch.sort
        return torch.from_numpy(np.sort(scaled.numpy(), axis=1)).flip(1)
    return scaled.topk(size, dim=1).values
