"""Logprobs of drawn tokens and of the top ids, by the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.sampling.fixed_point import log_of_mass, mass
from kernels.sampling.order import pack, unpack
from kernels.transfer import to_device

_COPY_ELEMENTS = {"cpu": 1 << 20}
_COPY_ELEMENTS_OF_DEVICE = 1 << 24
"""Number of logits copied at a time: close to a CPU's cache, and few launches on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """
    Logprobs of Q rows, as natural logarithms; the best id comes first, the lower one on ties.

    Attributes:
        row: int64 ``[Q]`` on the host, rows of the logits, ascending.
        num_top: int64 ``[Q]`` on the host, number of the K entries that each row asked for.
        chosen: float32 ``[Q]``, logprob of the drawn token.
        top_token: int64 ``[Q, K]``, top ids.
        top: float32 ``[Q, K]``, their logprobs.
        requested_ids: int64 ``[Q, W]`` on the host, ids that the rows requested, -1 after the last;
            None if no row did.
        requested: float32 ``[Q, W]``, their logprobs; arbitrary for -1.
    """

    row: Tensor
    num_top: Tensor
    chosen: Tensor
    top_token: Tensor
    top: Tensor
    requested_ids: Tensor | None = None
    requested: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """
    Scores of a given token in each of R rows.

    Attributes:
        valid: bool ``[R]``; False where the logits held NaN or +infinity, or only -infinity: the
            row's other scores have no meaning.
        chosen: float32 ``[R]``, logprob of the token.
        rank: int64 ``[R]``, place of the token among all ids, as from `ranks`.
        top_token: int64 ``[R, K]``, top ids.
        top: float32 ``[R, K]``, their logprobs.
    """

    valid: Tensor
    chosen: Tensor
    rank: Tensor
    top_token: Tensor
    top: Tensor


def totals(values: Tensor) -> tuple[Tensor, Tensor]:
    """
    Compute the two parts of each row's log-sum-exp, of float32 ``[Q, V]``: the best value, and the
    logarithm of the sum of e ** (value - best), ``[Q, 1]`` each.

    A logprob is a value minus the one, minus the other: that difference is near 0 for ids that
    matter, where float32 is most precise. The sum is in fixed point, so that its bits do not depend
    on the order, on the batch or on how many ranks share the ids.
    """
    best = values.amax(dim=1, keepdim=True)
    return best, log_of_mass(best, mass(values - best).sum(dim=1, keepdim=True))


def logprobs(
    logits: Tensor,
    token: Tensor,
    num_top: Tensor,
    *,
    totals_of: Callable[[Tensor], tuple[Tensor, Tensor]] = totals,
) -> Logprobs | None:
    """
    Compute the logprobs of the rows that ask for them.

    Args:
        logits: Floating ``[R, V]``, before any edit.
        token: int64 ``[R]``, drawn from them.
        num_top: int64 ``[R]`` on the host: number of top ids to report; -1 for a row without
            logprobs.
        totals_of: `totals` or another implementation of it.

    Returns:
        Logprobs, with K the largest number asked for, at most V; None if no row asks.
    """
    row = (num_top >= 0).nonzero()[:, 0]
    if len(row) == 0:
        return None
    asked = num_top[row].clamp(max=logits.shape[1])
    width = int(asked.max())
    parts = [
        _tell(logits, token, part, width, totals_of)
        for part in torch.split(row, rows_per_copy(logits))
    ]
    chosen, top_token, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return Logprobs(row=row, num_top=asked, chosen=chosen, top_token=top_token, top=top)


def ranks(logits: Tensor, token: Tensor, logit: Tensor | None = None) -> Tensor:
    """
    Compute the place of each row's token among all ids by logit, from 1, the lower id first on
    ties: int64 ``[R]``.

    Args:
        logits: Floating ``[R, V]``.
        token: int64 ``[R]``; may be any integer if `logit` is given.
        logit: Floating ``[R]``, logits of the tokens; None takes them from `logits`.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    size, parts = rows_per_copy(logits), []
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        values, own = logits[rows], token[rows, None]
        bar = values.gather(1, own) if logit is None else logit[rows, None]
        is_before = (values > bar) | ((values == bar) & (ids < own))
        parts.append(is_before.sum(dim=1) + 1)
    return torch.cat(parts) if parts else token.clone()


def with_requested(logits: Tensor, told: Logprobs, ids: Tensor) -> Logprobs:
    """
    Add the logprobs of requested ids: that of the best id and the logit's distance from the best.

    Args:
        logits: Floating ``[R, V]``, before any edit.
        told: Logprobs of these rows, with at least the best id of each.
        ids: int64 ``[R, W]`` on the host, -1 after a row's last id.
    """
    device = logits.device
    mine = ids[told.row]
    row = to_device(told.row, device)[:, None]
    values = logits[row, to_device(mine.clamp(min=0), device)].float()
    best = logits[row, told.top_token[:, :1]].float()
    requested = (values - best) + told.top[:, :1]
    return replace(told, requested_ids=mine, requested=requested)


def rows_per_copy(logits: Tensor) -> int:
    """Return the number of rows that are copied to float32 at a time, to leave memory for KV."""
    elements = _COPY_ELEMENTS.get(logits.device.type, _COPY_ELEMENTS_OF_DEVICE)
    return max(1, elements // logits.shape[1])


def _tell(
    logits: Tensor,
    token: Tensor,
    row: Tensor,
    width: int,
    totals_of: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of these rows' tokens, and their `width` top ids with logprobs."""
    here = to_device(row, logits.device)
    values = logits[here].float()
    best, log_sum = totals_of(values)
    chosen = (values.gather(1, token[here][:, None]) - best - log_sum)[:, 0]
    top_token = best_ids(values, width)
    return chosen, top_token, values.gather(1, top_token) - best - log_sum


def best_ids(values: Tensor, count: int) -> Tensor:
    """
    Return the ids of the largest values, best first, the lower id first on ties: int64
    ``[Q, count]``.

    Args:
        values: float32 ``[Q, V]`` without NaN.
        count: Number of ids, 0 to V.
    """
    if count == 0 or values.device.type != "cpu":
        return _best_by_key(values, count)
    top, ids = values.topk(count, dim=1)
    # `topk` defines neither the order of ties nor its choice among ties at the cut.
    ids, by_id = ids.sort(dim=1)
    order = top.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    is_open = (values >= top[:, -1:]).sum(dim=1) > count
    if is_open.any():
        ids[is_open] = _best_by_key(values[is_open], count)
    return ids


def _best_by_key(values: Tensor, count: int) -> Tensor:
    """Return the same by one integer per id that sorts as (value, -id), without reading values."""
    if count == 0:
        return torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    keys = pack(values, torch.arange(values.shape[1], device=values.device))
    return unpack(keys.topk(count, dim=1).values)[1]
