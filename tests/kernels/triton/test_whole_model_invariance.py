"""A whole model on Triton's kernels with batch_invariant: a sequence's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.executor_svc.stepping import Bench, Row, batch, random_tokens
from tests.kernels.triton.test_whole_models import everything_on_triton
from tests.model_zoo import FAMILIES

__all__ = ["everything_on_triton"]

PROMPT_LEN = 28
CUTS = [12, 1, 15]


def logits(directory: Path, cuts: list[int], others: int) -> torch.Tensor:
    """Of a prompt in these chunks after others that go on one by one, ``[PROMPT_LEN, vocab_size]``."""
    bench = Bench.build(
        directory, block_size=7, num_slots=3, shuffle_seed=others, batch_invariant=True
    )
    admits = [bench.admit(slot, random_tokens(PROMPT_LEN + 8, slot)) for slot in range(others + 1)]
    found, done = [], 0
    for step, length in enumerate(cuts):
        rows = [Row(slot, step, 1, samples=False) for slot in range(1, others + 1)]
        rows.append(Row(0, done, length, samples=False))
        found.append(bench.runner.forward_logits(batch(*rows, admits=admits))[others:])
        done += length
        admits = []
    return torch.cat(found)


@pytest.mark.slow
def test_logits_are_the_same_in_any_batch_and_chunks(tmp_path, everything_on_triton):
    """
    Through every kernel, a prompt at once alone has the bits of its chunks and decodes after another row.
    """
    directory = FAMILIES["mistral_window"](tmp_path)
    everything_on_triton()
    expected = logits(directory, [PROMPT_LEN], 0)
    assert torch.equal(expected, logits(directory, CUTS, 1))
