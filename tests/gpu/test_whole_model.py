"""Whole models on a device as the executor runs them there, against the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor_svc.step.graphs.capture import GraphDevice
from executor_svc.step.graphs.cuda import CudaGraphs
from executor_svc.step.runner import MARGIN_EPS, ModelRunner
from tandem.link.results import StepResult
from tandem_bench.device.shapes import SHAPES
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.stepping import Row, admission, batch, random_tokens
from tests.gpu.models import BLOCK_SIZE, FILTERED, GREEDY, NOISY, decodes, make_runner

LENGTHS = (29, 3, 70)
NUM_DECODES = 8
LONGEST = 96
SAMPLINGS = (GREEDY, NOISY, FILTERED)
BLOCKS_EACH = LONGEST // BLOCK_SIZE

MODELS = {
    "plain": replace(SHAPES["tiny"], tied_embeddings=False),
    "normed-windowed": replace(
        SHAPES["tiny"], tied_embeddings=False, qk_norm=True, windows=(None, 24), head_dim=80
    ),
}


def runner(name: str, device: torch.device, graphs: GraphDevice | None) -> ModelRunner:
    """
    Return a warm runner in float32 that tells margins, with the same weights on every device.
    """
    return make_runner(
        MODELS[name],
        torch.float32,
        device,
        num_slots=len(LENGTHS),
        max_model_len=LONGEST,
        graphs=graphs,
        sizes=(3,),
        collect_margins=True,
    )


def conversation(made: ModelRunner) -> list[StepResult]:
    """Run two sequences in chunks, the third while they decode; then all decode."""
    admits = [
        admission(
            slot,
            random_tokens(length, slot, SHAPES["tiny"].vocab_size),
            range(1 + slot * BLOCKS_EACH, 1 + (slot + 1) * BLOCKS_EACH),
            sampling=SAMPLINGS[slot],
        )
        for slot, length in enumerate(LENGTHS)
    ]
    steps = [
        batch(Row(1, 0, 3), Row(0, 0, 20, samples=False), admits=admits[:2]),
        batch(Row(1, 3), Row(0, 20, 9), Row(2, 0, 70), admits=admits[2:]),
        *decodes([29, 4, 70], [3] * NUM_DECODES),
    ]
    return [made.execute(step, number) for number, step in enumerate(steps)]


@pytest.mark.parametrize("name", MODELS)
class TestTokens:
    def test_are_those_of_the_cpu(self, name, device):
        """
        Chunks, decodes and captured decodes, greedy and drawn, give the CPU's tokens; until one was won by less than rounding.
        """
        graphs = CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()
        expected = conversation(runner(name, torch.device("cpu"), None))
        found = conversation(runner(name, device, graphs))
        alike = dict.fromkeys(range(len(LENGTHS)), True)
        compared = 0
        for one, other in zip(expected, found, strict=True):
            assert () == other.row_errors
            assert one.slot.tolist() == other.slot.tolist()
            assert one.margin is not None
            for slot, left, right, margin in zip(
                one.slot.tolist(), one.token, other.token, one.margin, strict=True
            ):
                if alike[slot] and left != right:
                    assert margin <= MARGIN_EPS[torch.float32], (one.step_id, slot)
                    alike[slot] = False
                compared += alike[slot]
        assert compared >= NUM_DECODES
