"""All of `sample` on a device, by the Triton kernels of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling import reference, triton_kernel
from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits.reference import LogitEdits
from kernels.sampling.edits.triton_kernel import edited
from kernels.sampling.logprobs.reference import rows_per_copy
from kernels.sampling.logprobs.triton_logprobs import logprobs
from kernels.sampling.triton_kernel import Needs
from kernels.transfer import to_device


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    *,
    edits: LogitEdits | None = None,
    num_logprobs: Tensor | None = None,
    margin_eps: float | None = None,
) -> Sampled:
    """
    Draw one token per row; arguments are as in the package's `sample`, unchecked.

    The host does not wait for the device if the columns are on the host. Only edited rows are
    copied. A row's token and logprobs have the same bits alone and in any batch. Margins are
    computed by the definition, for the tokens drawn here.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    token, valid = _drawn(logits, columns)
    if edits is not None:
        for rows in torch.split(edits.rows, rows_per_copy(logits)):
            here = to_device(rows, logits.device)
            changed = edited(logits, edits, rows)
            token[here], valid[here] = _drawn(changed, columns.select(rows.to(_home(columns))))
    margin = None
    if margin_eps is not None:
        margin = reference.margin_of(logits, columns, token, edits, margin_eps)
    told = None
    if num_logprobs is not None:
        told = logprobs(logits, token, num_logprobs)
    return Sampled(token=token, valid=valid, margin=margin, logprobs=told)


def _home(columns: SamplingColumns) -> torch.device:
    return columns.temperature.device


def _drawn(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    needs = Needs.of(columns, logits.shape[1])
    return triton_kernel.draw(logits, columns.to(logits.device), needs)
