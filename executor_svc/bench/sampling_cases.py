"""Drawing tokens, in the three ways whose costs differ."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from executor_svc.bench.case import TANDEM, Case
from executor_svc.bench.operands import random_numbers
from executor_svc.bench.timing import Call
from kernels.sampling import Needs, SamplingColumns, draw, sample

_LOGIT_DEVIATION = 2.5
"""Of random weights' logits it would be less; a trained model's nucleus is about this narrow."""

KINDS = {
    "greedy": (0.0, 0, 1.0),
    "noise": (1.0, 0, 1.0),
    "filtered": (0.8, 50, 0.9),
}
"""Temperature, top_k and top_p."""


def sampling_cases(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[Case]:
    """One case per kind for float32 logits ``[num_rows, vocab_size]``, which are read once."""
    for kind in KINDS:
        yield Case(
            operation=f"sampling_{kind}",
            shape=f"B={num_rows} V={vocab_size}",
            implementation=TANDEM,
            num_bytes=num_rows * vocab_size * torch.float32.itemsize,
            num_flop=0,
            make=partial(_draw, kind, num_rows, vocab_size, device),
        )


def _draw(kind: str, num_rows: int, vocab_size: int, device: torch.device, seed: int) -> Call:
    logits = random_numbers(
        (num_rows, vocab_size), torch.float32, device, seed=seed, scale=_LOGIT_DEVIATION
    )
    columns = _columns(kind, num_rows)
    if device.type == "cuda":  # as a captured step draws: its columns lie on the device
        needs = Needs.of(columns, vocab_size)
        there = columns.to(device)
        return lambda: draw(logits, there, needs)
    return lambda: sample(logits, columns)


def _columns(kind: str, num_rows: int) -> SamplingColumns:
    temperature, top_k, top_p = KINDS[kind]
    return SamplingColumns(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        seed=torch.arange(num_rows),
        position=torch.full((num_rows,), 100),
        choice=torch.zeros(num_rows, dtype=torch.int64),
    )
