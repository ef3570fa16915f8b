"""Calls of the sampler as an executor makes them, for compiling."""

from __future__ import annotations

import torch

from kernels.sampling import triton_sampler
from kernels.sampling.logprobs.triton_kernel import log_total
from kernels.sampling.triton_kernel import Needs, draw
from tests.kernels.sampling.edit_oracle import RowEdits, edits_of
from tests.kernels.sampling.rows import make_columns


def launch_draw(*, num_rows: int, vocab_size: int, dtype: str, first_row: int = 0) -> None:
    """
    Launch a batch that needs every cut; its columns are the rows of longer ones from `first_row`
    on.
    """
    logits = torch.empty((num_rows, vocab_size), dtype=getattr(torch, dtype))
    columns = make_columns(first_row + num_rows, min_p=0.1).select(slice(first_row, None))
    draw(logits, columns, Needs())


def launch_edits(*, vocab_size: int, dtype: str) -> None:
    """
    Launch greedy rows, one of them with penalties and biases, and the sum under log probabilities.
    """
    row = RowEdits(prompt=(1, 2), output=(3,), frequency=1.0, bias=((4, 1.0),))
    triton_sampler.sample(
        torch.zeros((3, vocab_size), dtype=getattr(torch, dtype)),
        make_columns(3, temperature=0.0),
        edits=edits_of({1: row}),
    )
    log_total(torch.empty((2, vocab_size)))
