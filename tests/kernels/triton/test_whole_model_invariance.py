"""Bits of a sequence in a whole model on Triton's kernels with batch_invariant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import Bench, Row, admission, batch, forward_logits, random_tokens
from tests.kernels.triton.test_whole_models import Repeated, everything_on_triton
from tests.model_zoo import FAMILIES

__all__ = ["everything_on_triton"]

pytestmark = pytest.mark.usefixtures("rows_alone_in_products")

PROMPT_LEN = 28
CUTS = [12, 1, 15]


def logits(directory: Path, cuts: list[int], others: int) -> torch.Tensor:
    """
    Return logits of a prompt in these chunks after others that go on one by one,
    ``[PROMPT_LEN, vocab_size]``.
    """
    bench = Bench.build(
        directory, block_size=7, num_slots=3, shuffle_seed=others, batch_invariant=True
    )
    admits = [bench.admit(slot, random_tokens(PROMPT_LEN + 8, slot)) for slot in range(others + 1)]
    found, done = [], 0
    for step, length in enumerate(cuts):
        rows = [Row(slot, step, 1, samples=False) for slot in range(1, others + 1)]
        rows.append(Row(0, done, length, samples=False))
        found.append(forward_logits(bench.runner, batch(*rows, admits=admits))[others:])
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


NUM_DECODES = 1
LENGTHS = (20, 3)
"""Lengths of prompts; the first has more keys than any tile of float32 holds."""

NOISY = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def generated(
    directory: Path, others: int, **captures: object
) -> tuple[list[int], list[torch.Tensor]]:
    """
    Return the tokens of a prompt after other rows, and per layer the keys and values that it
    leaves.
    """
    bench = Bench.build(directory, block_size=7, num_slots=3, batch_invariant=True, **captures)
    for graphs in bench.runner._captured():
        graphs.capture()
    lengths = LENGTHS[: others + 1]
    admits = [
        admission(
            slot,
            random_tokens(length, slot),
            bench.take_blocks(length + NUM_DECODES),
            sampling=NOISY,
        )
        for slot, length in enumerate(lengths)
    ]
    rows = [Row(slot, 0, length) for slot, length in enumerate(lengths)][::-1]
    tokens = []
    for step in range(NUM_DECODES + 1):
        result = bench.runner.execute(batch(*rows, admits=admits), step)
        assert () == result.row_errors
        tokens.append(int(result.token[-1]))
        rows = [Row(row.slot, row.start + row.num_tokens) for row in rows]
        admits = []
    own = bench.runner.slots.block_table[0, :3].tolist()
    written = slice(LENGTHS[0] + NUM_DECODES)
    return tokens, [layer[own].flatten(0, 1)[written].clone() for layer in bench.kv.layers]


@pytest.mark.slow
def test_captured_steps_have_the_bits_of_eager_ones(tmp_path, everything_on_triton):
    """
    In captured steps, beside another row and padding, a prompt and its decodes leave the keys, values and drawn tokens they
    leave alone in steps that are not.
    """
    directory = FAMILIES["mistral_window"](tmp_path)
    everything_on_triton()
    tokens, written = generated(directory, 0)
    device = Repeated()
    plan = GraphPlan(device=device, sizes=(3,), mixed=(GraphShape(sum(LENGTHS) + 1, 3, 0),))
    among_tokens, among_written = generated(directory, 1, static_rows=3, graph_plan=plan)
    assert tokens == among_tokens
    assert all(map(torch.equal, written, among_written))
    assert 1 + NUM_DECODES == device.num_replays
