"""Whole models on Triton's kernels, and on the definitions: the same logits and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from executor_svc.step.graphs.capture import Captured
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape
from kernels import dispatch
from kernels.paged_attention import triton_decode
from tandem.link.batch import Batch
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import (
    GREEDY,
    Bench,
    Row,
    admission,
    batch,
    forward_logits,
    random_tokens,
)
from tests.model_zoo import FAMILIES

TOLERANCE = 1e-4
"""Float32 sums in another order differ by about 1e-6 per unit of logit; logits here reach about 10."""

LENGTHS = (29, 3, 12)
NUM_DECODES = 3
SAMPLING = (
    GREEDY,
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=3),
    SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, seed=2**63, min_p=0.01, repetition_penalty=1.3
    ),
)

Run = Callable[[Bench, Batch], object]


class Repeated:
    """
    Graphs that capture by noting calls, and replay by calling them: what kernels run is not
    recorded.
    """

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, runs: Sequence[Callable[[], None]]) -> Captured:
        return Captured(graphs=tuple(map(self._graph, runs)), num_bytes=0)

    def drain(self) -> None:
        pass

    def _graph(self, run: Callable[[], None]) -> SimpleNamespace:
        def replay() -> None:
            self.num_replays += 1
            run()

        return SimpleNamespace(replay=replay)


@pytest.fixture
def everything_on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that makes the CPU run what a CUDA device would, in the interpreter."""

    def switch() -> None:
        switched = set()
        for name, operation in dispatch._operations.items():
            if "cuda" in operation._faster:
                monkeypatch.setitem(operation._faster, "cpu", operation._faster["cuda"])
                switched.add(name)
        needed = {"paged_attention", "rms_norm", "rope_kv_write", "sampling", "silu_mul"}
        assert needed <= switched
        # The interpreter pays for each program, and no bit depends on how many share a row.
        monkeypatch.setattr(triton_decode, "decode_splits", lambda *_args, **_kwargs: 1)
        dispatch.configure({})

    yield switch
    monkeypatch.undo()
    dispatch.configure({})


def chunk_then_decode(
    directory: Path,
    run: Run,
    samplings: Sequence[SamplingParams] = SAMPLING,
    static_rows: int = 0,
    graph_plan: GraphPlan | None = None,
) -> list[object]:
    """Run two sequences in chunks, the third while they decode; then all decode."""
    bench = Bench.build(
        directory,
        block_size=7,
        num_blocks=24,
        num_slots=3,
        shuffle_seed=1,
        static_rows=static_rows,
        graph_plan=graph_plan,
    )
    for graphs in bench.runner._captured():
        graphs.capture()
    admits = [
        admission(
            slot,
            random_tokens(length, slot),
            bench.take_blocks(length + NUM_DECODES + 1),
            sampling=sampling,
        )
        for slot, (length, sampling) in enumerate(zip(LENGTHS, samplings, strict=True))
    ]
    found = [run(bench, batch(Row(1, 0, 3), Row(0, 0, 20, samples=False), admits=admits[:2]))]
    found.append(run(bench, batch(Row(1, 3), Row(0, 20, 9), Row(2, 0, 12), admits=admits[2:])))
    for step in range(NUM_DECODES):
        rows = [Row(1, 4 + step), Row(0, 29 + step), Row(2, 12 + step)]
        found.append(run(bench, batch(*rows)))
    return found


def logits(bench: Bench, step: Batch) -> torch.Tensor:
    return forward_logits(bench.runner, step)


def tokens(bench: Bench, step: Batch) -> list[int]:
    result = bench.runner.execute(step, 1)
    assert () == result.row_errors
    return result.token.tolist()


BOTH = pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
NORMED = pytest.mark.parametrize("family", ["qwen3"])
WINDOW = pytest.mark.parametrize("family", ["mistral_window"])
"""One family is enough where logits are known to be right: what draws tokens knows no family."""


@pytest.mark.slow
class TestWholeModels:
    @BOTH
    def test_logits_are_those_of_the_definitions(self, family, tmp_path, everything_on_triton):
        """
        Chunks and decodes of one batch, through every kernel, have the logits of the definitions.
        """
        directory = FAMILIES[family](tmp_path / family)
        dispatch.configure(dict.fromkeys(dispatch._operations, dispatch.REFERENCE))
        expected = torch.cat(chunk_then_decode(directory, logits))
        everything_on_triton()
        found = torch.cat(chunk_then_decode(directory, logits))
        assert (expected - found).abs().max() <= TOLERANCE

    @NORMED
    def test_tokens_are_those_of_the_definitions(self, family, tmp_path, everything_on_triton):
        """
        Greedy and drawn tokens, each fed back into the next step, are those of the definitions.
        """
        directory = FAMILIES[family](tmp_path / family)
        dispatch.configure(dict.fromkeys(dispatch._operations, dispatch.REFERENCE))
        expected = chunk_then_decode(directory, tokens)
        everything_on_triton()
        assert expected == chunk_then_decode(directory, tokens)

    @WINDOW
    def test_decodes_from_static_buffers_have_those_tokens(
        self, family, tmp_path, everything_on_triton
    ):
        """
        Decodes that feed themselves on the device get the same tokens.
        """
        directory = FAMILIES[family](tmp_path / family)
        unedited = [*SAMPLING[:2], replace(SAMPLING[2], repetition_penalty=1.0)]
        dispatch.configure(dict.fromkeys(dispatch._operations, dispatch.REFERENCE))
        expected = chunk_then_decode(directory, tokens, samplings=unedited)
        everything_on_triton()
        found = chunk_then_decode(directory, tokens, samplings=unedited, static_rows=3)
        assert expected == found

    @BOTH
    def test_captured_steps_with_prompts_have_those_tokens(
        self, family, tmp_path, everything_on_triton
    ):
        """
        Chunks and decodes beside them, each token a row of its own, get the same tokens.
        """
        directory = FAMILIES[family](tmp_path / family)
        unedited = [*SAMPLING[:2], replace(SAMPLING[2], repetition_penalty=1.0)]
        dispatch.configure(dict.fromkeys(dispatch._operations, dispatch.REFERENCE))
        expected = chunk_then_decode(directory, tokens, samplings=unedited)
        everything_on_triton()
        device = Repeated()
        plan = GraphPlan(device=device, sizes=(), mixed=(GraphShape(24, 3, 0),))
        found = chunk_then_decode(
            directory, tokens, samplings=unedited, static_rows=3, graph_plan=plan
        )
        assert expected == found
        assert 2 == device.num_replays
