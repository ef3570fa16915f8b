"""Steps given to the device before the results of those before them are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from executor_svc.step.graphs.cuda import CudaGraphs
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import Batch
from tandem_bench.device.shapes import SHAPES
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.stepping import Row, admission, batch, random_tokens
from tests.gpu.models import (
    BLOCK_SIZE,
    EDITED,
    FILTERED,
    GREEDY,
    NOISY,
    TOLD,
    decodes,
    make_runner,
    prompts,
)

LENGTHS = (9, 30, 4)
NUM_DECODES = 9
LONGEST = 64
MODEL = replace(SHAPES["tiny"], tied_embeddings=False)


def runner(device: torch.device, *, captures: bool, num_host_blocks: int = 0) -> ModelRunner:
    graphs = CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()
    return make_runner(
        MODEL,
        torch.float32,
        device,
        num_slots=len(LENGTHS),
        max_model_len=LONGEST,
        graphs=graphs if captures else None,
        sizes=(3,) if captures else (),
        num_host_blocks=num_host_blocks,
    )


def steps(*samplings) -> list[Batch]:
    """Return prompts, then decodes of all and of some rows, which begin blocks on their way."""
    counts = [3 if step % 5 else 2 for step in range(NUM_DECODES)]
    first = prompts(LENGTHS, samplings, LONGEST, MODEL.vocab_size)
    return [first, *decodes(LENGTHS, counts)]


@contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Make any operation on a GPU an error if the host would wait for it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "samplings",
    [(GREEDY, NOISY, FILTERED), (TOLD, GREEDY, NOISY), (EDITED, GREEDY, TOLD)],
    ids=["in-graph", "told", "edited"],
)
def test_launches_wait_for_nothing(device, captures, samplings):
    """
    Prompts and decodes all launched before the first result is asked for, none of them waiting for
    the device, get the tokens of steps waited for one by one.
    """
    waiting, ahead = runner(device, captures=captures), runner(device, captures=captures)
    expected = [waiting.execute(each, 0).token.tolist() for each in steps(*samplings)]
    with no_wait(device):
        collects = [ahead.launch(each, 0) for each in steps(*samplings)]
    results = [collect() for collect in collects]
    assert expected == [result.token.tolist() for result in results]
    assert captures == any(result.graph for result in results)
    assert all(result.timings.total_ns > 0 for result in results)


def test_swaps_and_copies_wait_for_nothing(device):
    """
    Steps that swap a block out and in again elsewhere, and copy one, are launched without waiting for the device, and what
    goes on from those blocks gets the tokens of steps waited for one by one.
    """
    own, other = (random_tokens(LENGTHS[slot], slot, MODEL.vocab_size) for slot in (0, 1))
    first = prompts(LENGTHS, [GREEDY, NOISY, FILTERED], LONGEST, MODEL.vocab_size)
    swapped = admission(0, [*own, 5], [3, 2], generation=2, num_cached_tokens=9, sampling=NOISY)
    copied = admission(
        0, [*other[:BLOCK_SIZE], 7], [4, 2], generation=3, num_cached_tokens=BLOCK_SIZE
    )
    steps = [
        first,
        batch(Row(1, 30), Row(2, 4), releases=[0], swaps_out=[(1, 2)]),
        batch(Row(1, 31), Row(0, 9), admits=[swapped], swaps_in=[(2, 3)]),
        batch(Row(0, 10), Row(1, 32)),
        batch(Row(1, 33), releases=[0]),
        batch(Row(0, 16), Row(2, 5), admits=[copied], copies=[(5, 4)]),
        batch(Row(0, 17), Row(2, 6)),
    ]
    waiting, ahead = (runner(device, captures=True, num_host_blocks=2) for _ in range(2))
    expected = [waiting.execute(each, 0).token.tolist() for each in steps]
    with no_wait(device):
        collects = [ahead.launch(each, 0) for each in steps]
    results = [collect() for collect in collects]
    assert [()] * len(steps) == [result.row_errors for result in results]
    assert expected == [result.token.tolist() for result in results]
