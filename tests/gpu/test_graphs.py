"""Captured decode steps: what a replay computes is what the same step computes eagerly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.config.graph_sizes import default_sizes
from executor_svc.step.batch_inputs import sampling_rows
from executor_svc.step.graphs.cuda import CudaGraphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import graph_shapes
from executor_svc.step.static_step import Drawing
from tandem.link.commands import KvMode
from tandem.sampling_params import SamplingParams
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.stepping import GREEDY, Bench, Row, admission, batch, random_tokens
from tests.model_zoo import FAMILIES

SAMPLING = (
    GREEDY,
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=77),
)

MOST_ROWS = {"cpu": 3, "cuda": 256}
"""
Most rows of a step, by kind of device: on a GPU through every cut of attention and of drawing by
the number of rows.
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3"](tmp_path_factory.mktemp("qwen3"))


def graph_device(device: torch.device) -> CudaGraphs | RecordedGraphs:
    return CudaGraphs(device) if device.type == "cuda" else RecordedGraphs()


class Prefilled:
    """A runner with a sequence in every slot and with captured decodes."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        num_slots: int,
        *,
        with_prompts: bool = False,
        keeps_addresses: bool = False,
    ) -> None:
        self.num_slots = num_slots
        mixed = graph_shapes(
            [6 * num_slots, 2 * num_slots] if with_prompts else [],
            max_requests=6 * num_slots,
            max_sequence_length=128,
            mixed_prefill_count=2,
        )
        self.bench = Bench.build(
            directory,
            dtype="bfloat16" if device.type == "cuda" else "float32",
            device=str(device),
            num_blocks=16 * num_slots + 16,
            num_slots=num_slots,
            max_model_len=128,
            keeps_addresses=keeps_addresses,
            shuffle_seed=1,
            static_rows=num_slots,
            graph_plan=GraphPlan(
                device=graph_device(device),
                sizes=default_sizes(num_slots),
                mixed=tuple(shape for shape in mixed if shape.num_prefills),
            ),
        )
        self.runner = self.bench.runner
        self.runner.warm_up()
        self.position = np.array([1 + 7 * slot % 31 for slot in range(num_slots)], np.int32)
        for slot, length in enumerate(self.position.tolist()):
            admit = admission(
                slot,
                random_tokens(length, seed=slot),
                self.bench.take_blocks(128),
                sampling=SAMPLING[slot % len(SAMPLING)],
            )
            self.runner.execute(batch(Row(slot, 0, length), admits=[admit]), slot)

    @property
    def graphs(self):
        return self.runner._graphs

    @property
    def step(self):
        return self.runner._static.step

    def prepare(self, slots: np.ndarray) -> None:
        self.step.prepare(slots, self.position[slots], self.runner.slots, self.runner._sampling)

    def decode(self, slots: np.ndarray) -> tuple[list[int], int]:
        """
        Run one step of some slots and return its tokens and the rows of the graph that did it.
        """
        rows = [Row(slot, int(self.position[slot])) for slot in slots.tolist()]
        result = self.runner.execute(batch(*rows), 0)
        self.position[slots] += 1
        assert not result.row_errors
        return result.token.tolist(), result.graph


@pytest.mark.slow
def test_replays_are_eager_steps_bit_for_bit(directory, device):
    """
    A graph with room for a step's rows, whatever their number and slots, leaves the logits, bit for
    bit, of the same padded step run eagerly.
    """
    prefilled = Prefilled(directory, device, num_slots=MOST_ROWS[device.type])
    order = np.random.default_rng(0)
    for num_rows in range(1, prefilled.num_slots + 1):
        slots = order.permutation(prefilled.num_slots)[:num_rows].astype(np.int32)
        prefilled.prepare(slots)
        size = prefilled.graphs.size_for(num_rows)
        logits = prefilled.step.logits(num_rows)
        with torch.inference_mode():
            prefilled.step.run(size, Drawing.OUTSIDE)
            eager = logits.clone()
            logits.fill_(float("nan"))
            assert size == prefilled.graphs.run(num_rows, Drawing.OUTSIDE)
        assert eager.isfinite().all()
        assert torch.equal(eager, logits)


def test_replays_draw_the_tokens_of_eager_steps(directory, device, scale):
    """
    Greedy and seeded rows that come, go and change places get the tokens of a runner that captured
    nothing, as long as both compute the same rows.
    """
    graphed = Prefilled(directory, device, num_slots=3 * scale)
    eager = Prefilled(directory, device, num_slots=3 * scale)
    eager.graphs.drop()
    order = np.random.default_rng(0)
    for num_rows in sorted({1, 2, 3 * scale}):
        slots = order.permutation(graphed.num_slots)[:num_rows].astype(np.int32)
        found, graph = graphed.decode(slots)
        expected, no_graph = eager.decode(slots)
        assert (num_rows, 0) == (graph, no_graph)
        assert expected == found


def test_replays_with_prompts_are_eager_steps_bit_for_bit(directory, device, scale):
    """
    A captured step of a prompt and decodes leaves the tokens and the keys and values, bit for bit,
    of the same padded step run eagerly.
    """
    prefilled = Prefilled(directory, device, num_slots=3 * scale, with_prompts=True)
    runner, mixed = prefilled.runner, prefilled.runner._mixed
    last = prefilled.num_slots - 1
    for prompt_len in (2, 5 * scale):
        blocks = prefilled.bench.take_blocks(128)
        runner.execute(batch(releases=[last]), 0)
        admit = admission(
            last, random_tokens(prompt_len, seed=8), blocks, generation=prompt_len, sampling=GREEDY
        )
        rows = [Row(slot, int(prefilled.position[slot])) for slot in range(last)]
        step = batch(*rows, Row(last, 0, prompt_len), admits=[admit])
        result = runner.execute(step, 0)
        shape = mixed.shape_for(step, sampling_rows(step))
        assert shape is not None
        assert (shape.num_tokens, last + 1) == (result.graph, len(result.token))
        cache = [layer[1:].clone() for layer in prefilled.bench.kv.layers]
        with torch.inference_mode():
            mixed._step.run(shape)
        assert result.token.tolist() == mixed._step.tokens(last + 1).tolist()
        for was, layer in zip(cache, prefilled.bench.kv.layers, strict=True):
            assert torch.equal(was.nan_to_num(), layer[1:].nan_to_num())
        prefilled.position[:last] += 1


@pytest.mark.slow
@pytest.mark.parametrize("keeps_addresses", [False, True], ids=["moving", "static"])
def test_sequences_go_on_after_their_memory_was_given_back(directory, device, *, keeps_addresses):
    """
    After KV memory was given back every sequence goes on with the tokens it would have had: by graphs that are captured anew
    where it came to lie elsewhere, and by the same where it keeps its addresses.
    """
    gone, stayed = (
        Prefilled(directory, device, num_slots=2, keeps_addresses=keeps)
        for keeps in (keeps_addresses, False)
    )
    slots = np.arange(2, dtype=np.int32)
    assert stayed.decode(slots) == gone.decode(slots)
    before = [layer.data_ptr() for layer in gone.bench.kv.layers]
    gone.runner.suspend(KvMode.OFFLOAD)
    gone.runner.resume()
    assert (1 if keeps_addresses else 2) == gone.graphs.num_captures
    if keeps_addresses:
        assert before == [layer.data_ptr() for layer in gone.bench.kv.layers]
    assert [stayed.decode(slots) for _ in range(3)] == [gone.decode(slots) for _ in range(3)]
