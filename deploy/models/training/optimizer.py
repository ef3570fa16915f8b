"""
Muon for matrices, to be used beside AdamW for embeddings and norms.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalize(update: Tensor) -> Tensor:
    """Return a matrix near the closest semi-orthogonal one to ``update [M, N]``, in its dtype."""
    a, b, c = _NEWTON_SCHULZ
    x = update
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.T if is_tall else x
    return result


class Muon:
    """
    Momentum whose update is orthogonalised; owns one fp32 buffer per matrix.

    Args:
        matrices: Weights ``[M, N]`` that receive gradients.
        momentum: Decay of the Nesterov momentum buffer.
        weight_decay: Fraction of the weight removed per step and unit learning rate.
        dtype: What the orthogonalisation computes in; bf16 is enough, where it is quick.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        *,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        self.matrices = list(matrices)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.dtype = dtype
        self.buffers = [torch.zeros_like(matrix) for matrix in self.matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply one update and drop the gradients."""
        for matrix, buffer in zip(self.matrices, self.buffers, strict=True):
            if matrix.grad is None:
                continue
            buffer.lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonalize(matrix.grad.lerp(buffer, self.momentum).to(self.dtype))
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.mul_(1 - learning_rate * self.weight_decay)
            matrix.add_(update.to(matrix.dtype), alpha=-learning_rate * scale)
            matrix.grad = None
