"""Cross-entropy of a linear head that never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS_PER_CHUNK = 512


class _HeadLoss(torch.autograd.Function):
    """Mean loss whose gradients are computed together with it, chunk by chunk of rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Sum the loss over chunks; ``hidden [N, D]``, ``weight [V, D]``, ``targets [N]``."""
        rows = hidden.shape[0]
        narrow = weight.to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, rows, _ROWS_PER_CHUNK):
            part = hidden[start : start + _ROWS_PER_CHUNK]
            target = targets[start : start + _ROWS_PER_CHUNK, None]
            log_probs = torch.log_softmax((part @ narrow.T).float(), dim=-1)
            total -= log_probs.gather(1, target).sum()
            error = log_probs.exp_()
            error.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
            narrow_error = error.mul_(1 / rows).to(hidden.dtype)
            hidden_grad[start : start + _ROWS_PER_CHUNK] = narrow_error @ narrow
            weight_grad += narrow_error.T @ part
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale the stored gradients."""
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """
    Return the mean cross-entropy in nats of ``softmax(hidden @ weight.T)``.

    Args:
        hidden: States ``[N, D]``, bf16 or fp32; matrix products run in this dtype.
        weight: Head ``[V, D]`` in fp32; receives an fp32 gradient.
        targets: Expected ids ``[N]``, int64.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]  # torch's own
    return loss


def unlikelihood_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """
    Return the mean of ``-log(1 - p)`` of tokens that are to become less likely.

    Args:
        hidden: States ``[N, D]``, bf16 or fp32; matrix products run in this dtype.
        weight: Head ``[V, D]`` in fp32; receives an fp32 gradient.
        targets: Unwanted ids ``[N]``, int64.
    Source: Welleck et al., "Neural text generation with unlikelihood training" (2019).
    """
    logits = (hidden @ weight.to(hidden.dtype).T).float()
    # As a difference of logarithms, since 1 - p is 0 in fp32 for a token that is all but certain.
    others = logits.scatter(1, targets[:, None], float("-inf"))
    return (logits.logsumexp(-1) - others.logsumexp(-1)).mean()
