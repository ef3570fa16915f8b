"""The top_k and top_p cuts without a full sort where a short prefix of the best values decides."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling.reference import mass, nucleus_mass

_PREFIXES = (64, 1024)
"""Best values looked at before sorting all: a trained model's nucleus rarely needs the second."""

_NEVER = float("-inf")


def cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """
    Set every id outside its row's kept set to -infinity, in place; see `reference.keep`.

    Args:
        scaled: float32[R, V], at most 0, best value of a row 0.
        top_k: int32[R], on any device; only its host copy chooses the path.
        top_p: float32[R], likewise.
    """
    has_k = (top_k > 0) & (top_k < scaled.shape[1])
    for rows, part in _parts(scaled, has_k):
        k = top_k[rows]
        largest = part.topk(int(k.max()), dim=1).values
        threshold = largest.gather(1, k.to(part.device).long()[:, None] - 1)
        _drop_below(scaled, rows, part, threshold)
    for rows, part in _parts(scaled, top_p < 1):
        target = nucleus_mass(mass(part).sum(dim=1), top_p[rows].to(part.device))
        threshold = _nucleus_threshold(part, target)
        _drop_below(scaled, rows, part, threshold[:, None])


def _parts(scaled: Tensor, wanted: Tensor) -> list[tuple[Tensor | slice, Tensor]]:
    """The wanted rows as one part, without a copy if that is all rows; no part if there is none."""
    if bool(wanted.all()):
        return [(slice(None), scaled)]
    if not bool(wanted.any()):
        return []
    rows = wanted.nonzero()[:, 0]
    return [(rows, scaled[rows.to(scaled.device)])]


def _drop_below(scaled: Tensor, rows: Tensor | slice, part: Tensor, threshold: Tensor) -> None:
    part.masked_fill_(part < threshold, _NEVER)
    if isinstance(rows, Tensor):
        scaled[rows.to(scaled.device)] = part


def _nucleus_threshold(scaled: Tensor, target: Tensor) -> Tensor:
    """Smallest value in each row's nucleus: float32[R]; `target` is float64[R]."""
    vocab_size = scaled.shape[1]
    threshold = torch.empty_like(scaled[:, 0])
    pending = torch.arange(scaled.shape[0], device=scaled.device)
    # a device sorts faster than it could report whether a prefix was enough
    prefixes = _PREFIXES if scaled.device.type == "cpu" else ()
    for size in (*(prefix for prefix in prefixes if prefix < vocab_size), vocab_size):
        ordered = scaled.topk(size, dim=1).values
        weight = mass(ordered)
        reached = weight.cumsum(dim=1)
        count = ((reached - weight).double() < target[:, None]).sum(dim=1).clamp(min=1)
        threshold[pending] = ordered.gather(1, count[:, None] - 1)[:, 0]
        if size == vocab_size:
            break
        undecided = (reached[:, -1].double() < target).nonzero()[:, 0]
        if undecided.numel() == 0:
            break
        pending, scaled, target = pending[undecided], scaled[undecided], target[undecided]
    return threshold
