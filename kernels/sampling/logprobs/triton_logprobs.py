"""Logprobs on a device, with the log-sum-exp of the Triton kernel."""

from __future__ import annotations

from torch import Tensor

from kernels.sampling.logprobs import reference
from kernels.sampling.logprobs.triton_kernel import log_total


def logprobs(logits: Tensor, token: Tensor, num_top: Tensor) -> reference.Logprobs | None:
    """Compute `reference.logprobs`; a row has the same bits alone and in any batch."""
    return reference.logprobs(logits, token, num_top, log_total=log_total)
