"""Logprobs on a device, with the log-sum-exp of the Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling.logprobs import reference
from kernels.sampling.logprobs.triton_kernel import log_total


def logprobs(logits: Tensor, token: Tensor, num_top: Tensor) -> reference.Logprobs | None:
    """Compute `reference.logprobs`; a row has the same bits alone and in any batch."""
    return reference.logprobs(logits, token, num_top, totals_of=_totals)


def _totals(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp as one part: 0, and all of it."""
    total = log_total(values)
    return torch.zeros_like(total), total
