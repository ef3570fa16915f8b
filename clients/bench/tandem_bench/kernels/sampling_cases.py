"""Cases of sampling tokens, one for each kind of sampling params that costs differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.sampling import LogitEdits, Needs, Penalties, SamplingColumns, draw, sample
from tandem_bench.device.case import TANDEM, Case
from tandem_bench.device.operands import random_numbers
from tandem_bench.device.timing import Call

_DEVIATION = 2.5
"""Standard deviation of the logits that makes a nucleus as narrow as a trained model's."""

_FLAT_DEVIATION = 0.5
"""Standard deviation of logits from random weights: nearly every id may be drawn."""

_HISTORY_LEN = 512
_NUM_LOGPROBS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """
    Sampling params that all rows of a case share.

    Attributes:
        operation: Name of the operation after "sampling_".
        is_flat: The logits are those of random weights.
        is_penalised: The rows have penalties; such rows, like those with log probabilities, are
            not sampled within a captured step.
        has_logprobs: Each token comes with the log probabilities of the likeliest ids.
    """

    operation: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    is_flat: bool = False
    is_penalised: bool = False
    has_logprobs: bool = False


KINDS = (
    Kind(operation="greedy", temperature=0.0),
    Kind(operation="noise"),
    Kind(operation="noise", is_flat=True),
    Kind(operation="top_p", top_p=0.9),
    Kind(operation="top_p", top_p=0.9, is_flat=True),
    Kind(operation="top_k", top_k=50),
    Kind(operation="min_p", min_p=0.05),
    Kind(operation="filtered", top_k=50, top_p=0.9),
    Kind(operation="penalised", is_penalised=True),
    Kind(operation="logprobs", has_logprobs=True),
)


def sampling_cases(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[Case]:
    """Yield a case per kind for float32 logits ``[num_rows, vocab_size]``, which are read once."""
    for kind in KINDS:
        if device.type == "cuda" and (kind.is_penalised or kind.has_logprobs):
            continue
        yield Case(
            operation=f"sampling_{kind.operation}",
            shape=f"B={num_rows} V={vocab_size}" + (" flat" if kind.is_flat else ""),
            implementation=TANDEM,
            num_bytes=num_rows * vocab_size * torch.float32.itemsize,
            num_flop=0,
            make=partial(_draw, kind, num_rows, vocab_size, device),
        )


def _draw(kind: Kind, num_rows: int, vocab_size: int, device: torch.device, seed: int) -> Call:
    deviation = _FLAT_DEVIATION if kind.is_flat else _DEVIATION
    shape = (num_rows, vocab_size)
    logits = random_numbers(shape, torch.float32, device, seed=seed, scale=deviation)
    columns = _columns(kind, num_rows)
    if device.type == "cuda":  # as a captured step draws: its columns lie on the device
        needs = Needs.of(columns, vocab_size)
        there = columns.to(device)
        return lambda: draw(logits, there, needs)
    edits = _edits(num_rows, vocab_size) if kind.is_penalised else None
    asked = torch.full((num_rows,), _NUM_LOGPROBS) if kind.has_logprobs else None
    return lambda: sample(logits, columns, edits=edits, num_logprobs=asked)


def _columns(kind: Kind, num_rows: int) -> SamplingColumns:
    return SamplingColumns(
        temperature=torch.full((num_rows,), kind.temperature),
        top_k=torch.full((num_rows,), kind.top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), kind.top_p),
        seed=torch.arange(num_rows),
        position=torch.full((num_rows,), 100),
        choice=torch.zeros(num_rows, dtype=torch.int64),
        min_p=torch.full((num_rows,), kind.min_p) if kind.min_p > 0 else None,
    )


def _edits(num_rows: int, vocab_size: int) -> LogitEdits:
    """Make all three penalties, on histories of which the second half is output."""
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(
        vocab_size, (num_rows, _HISTORY_LEN), generator=generator, dtype=torch.int32
    )
    return LogitEdits(
        penalties=Penalties(
            row=torch.arange(num_rows),
            repetition=torch.full((num_rows,), 1.1),
            frequency=torch.full((num_rows,), 0.2),
            presence=torch.full((num_rows,), 0.1),
            prompt_len=torch.full((num_rows,), _HISTORY_LEN // 2),
            history_len=torch.full((num_rows,), _HISTORY_LEN),
            history=history,
        )
    )
