"""Log probabilities of drawn tokens and of the likeliest ids, by the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.transfer import to_device

_COPY_ELEMENTS = {"cpu": 1 << 20}
_COPY_ELEMENTS_OF_DEVICE = 1 << 24
"""Logits copied at a time: near a CPU's cache, and few launches on a device."""

_LOW_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """
    Of Q rows, natural logarithms, best id first and the lower id first on ties.

    Attributes:
        row: int64 ``[Q]`` on the host, rows of the logits, ascending.
        num_top: int64 ``[Q]`` on the host, how many of the K entries each row asked for.
        chosen: float32 ``[Q]``, of the drawn token.
        top_token: int64 ``[Q, K]``.
        top: float32 ``[Q, K]``.
    """

    row: Tensor
    num_top: Tensor
    chosen: Tensor
    top_token: Tensor
    top: Tensor


def log_sum_exp(values: Tensor) -> Tensor:
    """Of each row of ``[Q, V]``: ``[Q, 1]``."""
    if values.device.type == "cpu":
        # Threads would share all rows, and what is in the middle of one depends on the batch.
        return torch.stack([row.logsumexp(dim=0, keepdim=True) for row in values])
    return values.logsumexp(dim=1, keepdim=True)


def logprobs(
    logits: Tensor,
    token: Tensor,
    num_top: Tensor,
    *,
    log_total: Callable[[Tensor], Tensor] = log_sum_exp,
) -> Logprobs | None:
    """
    Log-softmax of the rows that ask for it.

    Args:
        logits: Floating ``[R, V]``, before any edit.
        token: int64 ``[R]``, drawn from them.
        num_top: int64 ``[R]`` on the host: likeliest ids to tell; -1 for a row that does not ask.
        log_total: `log_sum_exp` or another way to it.

    Returns:
        None where no row asks. K is the largest number asked for, at most V.
    """
    row = (num_top >= 0).nonzero()[:, 0]
    if len(row) == 0:
        return None
    asked = num_top[row].clamp(max=logits.shape[1])
    width = int(asked.max())
    parts = [
        _tell(logits, token, part, width, log_total)
        for part in torch.split(row, rows_per_copy(logits))
    ]
    chosen, top_token, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return Logprobs(row=row, num_top=asked, chosen=chosen, top_token=top_token, top=top)


def rows_per_copy(logits: Tensor) -> int:
    """Rows of which sampling makes float32 copies at a time: memory is for KV."""
    elements = _COPY_ELEMENTS.get(logits.device.type, _COPY_ELEMENTS_OF_DEVICE)
    return max(1, elements // logits.shape[1])


def _tell(
    logits: Tensor,
    token: Tensor,
    row: Tensor,
    width: int,
    log_total: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of these rows' tokens, and their `width` likeliest ids with theirs."""
    here = to_device(row, logits.device)
    values = logits[here].float()
    total = log_total(values)
    chosen = (values.gather(1, token[here][:, None]) - total)[:, 0]
    top_token = best_ids(values, width)
    return chosen, top_token, values.gather(1, top_token) - total


def best_ids(values: Tensor, count: int) -> Tensor:
    """
    Ids of the largest values, best first, the lower id first on ties: int64 ``[Q, count]``.

    Args:
        values: float32 ``[Q, V]`` without NaN.
        count: 0 to V.
    """
    if count == 0 or values.device.type != "cpu":
        return _best_by_key(values, count)
    top, ids = values.topk(count, dim=1)
    # `topk` leaves open the order of ties, and which of several at the cut it takes.
    ids, by_id = ids.sort(dim=1)
    order = top.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    is_open = (values >= top[:, -1:]).sum(dim=1) > count
    if is_open.any():
        ids[is_open] = _best_by_key(values[is_open], count)
    return ids


def _best_by_key(values: Tensor, count: int) -> Tensor:
    """The same by one integer per id that sorts as (value, -id), without a look at the values."""
    if count == 0:
        return torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) + (_LOW_WORD - ids)
    return _LOW_WORD - (keys.topk(count, dim=1).values & _LOW_WORD)
