"""Decode steps captured and replayed, against steps with inputs that the host makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.step.decode_graphs import DecodeGraphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.static_step import DecodeStep, Drawing
from tandem.errors import InvalidConfig, OutOfMemory
from tandem.sampling_params import SamplingParams
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.stepping import GREEDY, Bench, Row, admission, batch, int32, random_tokens

Zoo = Callable[[str], Path]

NUM_SLOTS = 6
MAX_LEN = 64
PROMPT_LENS = (3, 9, 4, 17, 8, 1)
NOISY = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=2**64 - 5)
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=77)
SAMPLING = {
    Drawing.PLAIN: (GREEDY, NOISY, NOISY, GREEDY, NOISY, GREEDY),
    Drawing.FILTERED: (GREEDY, NOISY, FILTERED, FILTERED, NOISY, FILTERED),
}


def plan(sizes):
    return GraphPlan(device=RecordedGraphs(), sizes=tuple(sizes))


class Decoding:
    """
    Prefilled sequences in all slots of two runners with equal caches: one takes steps eagerly, and
    a step is captured from the device state of the other.
    """

    def __init__(self, directory, drawing=Drawing.FILTERED, *, sizes=(6, 3)):
        self.drawing = drawing
        self.eager, self.static = (
            Bench.build(
                directory,
                block_size=4,
                num_blocks=100,
                num_slots=NUM_SLOTS,
                max_model_len=MAX_LEN,
                shuffle_seed=3,
            )
            for _ in range(2)
        )
        admits = [
            admission(
                slot,
                random_tokens(length, seed=slot),
                self.eager.take_blocks(length + 24),
                sampling=SAMPLING[drawing][slot],
            )
            for slot, length in enumerate(PROMPT_LENS)
        ]
        rows = [Row(slot, 0, length) for slot, length in enumerate(PROMPT_LENS)]
        for bench in (self.eager, self.static):
            bench.runner.execute(batch(*rows, admits=admits), 1)
        self.position = np.array(PROMPT_LENS, np.int32)
        self.step = self._step()
        self.graphs = DecodeGraphs(self.step, plan(sizes))
        self.graphs.capture()

    def _step(self):
        runner = self.static.runner
        return DecodeStep(
            runner._decoder,
            runner._kv.layers,
            runner._tokens,
            runner._shape,
            runner._windows,
            num_slots=NUM_SLOTS,
            max_rows=NUM_SLOTS,
            max_blocks=MAX_LEN // 4,
        )

    def prepare(self, slots):
        runner = self.static.runner
        start = self.position[slots].astype(np.int32)
        self.step.prepare(int32(slots), start, runner.slots, runner._sampling)

    def replay(self, num_rows):
        """Replay one step and return its tokens."""
        with torch.inference_mode():
            self.graphs.run(num_rows, self.drawing)
            return self.step.launched().tolist()

    def eager_tokens(self, slots):
        """Run the same step with inputs from the host and return its tokens."""
        rows = [Row(slot, int(self.position[slot])) for slot in slots]
        self.position[slots] += 1
        return self.eager.runner.execute(batch(*rows), 2).token.tolist()


@pytest.fixture
def directory(zoo: Zoo) -> Path:
    return zoo("llama_gqa_llama3_rope")


@pytest.mark.parametrize("drawing", [Drawing.PLAIN, Drawing.FILTERED])
def test_replays_equal_eager_steps_for_every_number_of_rows(directory, drawing):
    """
    Greedy and seeded rows get the tokens of eager steps in graphs of their size and in larger ones,
    whichever slots come, go and change places.
    """
    decoding = Decoding(directory, drawing)
    order = np.random.default_rng(5)
    for num_rows in (1, 2, 3, 4, 5, 6, 2, 5):
        slots = order.permutation(NUM_SLOTS)[:num_rows].tolist()
        decoding.prepare(slots)
        found = decoding.replay(num_rows)
        assert decoding.eager_tokens(slots) == found


def test_tokens_feed_back_without_the_host(directory):
    """
    Replays one after another continue every row, with nothing sent between them.
    """
    decoding = Decoding(directory, sizes=(5,))
    slots = [4, 0, 3, 1]
    decoding.prepare(slots)
    words = decoding.step._packed.words.data_ptr()
    found = [decoding.replay(len(slots)) for _ in range(7)]
    assert [decoding.eager_tokens(slots) for _ in range(7)] == found
    assert words == decoding.step._packed.words.data_ptr()


def test_padding_touches_no_live_block(directory):
    """
    A step writes one position of each of its rows and, for padding, the dummy block; all else in
    the cache, full of NaN where never written, stays bit for bit.
    """
    decoding = Decoding(directory, sizes=(3,))
    slots = [5, 2]
    before = [layer.clone() for layer in decoding.static.kv.layers]
    decoding.prepare(slots)
    decoding.replay(len(slots))
    table = decoding.static.runner.slots.block_table
    written = {0} | {int(table[slot, PROMPT_LENS[slot] // 4]) for slot in slots}
    untouched = [block for block in range(101) if block not in written]
    for was, layer in zip(before, decoding.static.kv.layers, strict=True):
        assert torch.equal(was[untouched].view(torch.int32), layer[untouched].view(torch.int32))
    for slot in slots:
        block, offset = table[slot, PROMPT_LENS[slot] // 4], PROMPT_LENS[slot] % 4
        assert layer[block, offset].isfinite().all()
        assert torch.equal(was[block, :offset], layer[block, :offset])


def test_capture_leaves_slots_alone(directory):
    """
    Capturing anew between steps moves no sequence on and writes no block but the dummy.
    """
    decoding = Decoding(directory, sizes=(4,))
    decoding.prepare([0, 1, 2])
    first = decoding.replay(3)
    assert decoding.eager_tokens([0, 1, 2]) == first
    before = [layer[1:].clone() for layer in decoding.static.kv.layers]
    decoding.graphs.capture()
    after = [layer[1:] for layer in decoding.static.kv.layers]
    assert all(map(torch.equal, map(bits, before), map(bits, after)))
    decoding.prepare([0, 1, 2])
    assert decoding.eager_tokens([0, 1, 2]) == decoding.replay(3)
    assert 2 == decoding.graphs.num_captures


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


def test_graph_that_ran_is_told(directory):
    """
    A run says which graph did it, or that none did, with the same tokens.
    """
    decoding = Decoding(directory, sizes=(2,))
    for slots, expected in (([0, 1], 2), ([3, 4, 5], 0), ([1], 2)):
        decoding.prepare(slots)
        with torch.inference_mode():
            ran = decoding.graphs.run(len(slots), decoding.drawing)
        assert expected == ran
        assert decoding.eager_tokens(slots) == decoding.step.launched().tolist()


class Idle:
    """A step that only notes what it was asked to run."""

    max_rows = 6

    def __init__(self):
        self.runs = []

    def forget(self):
        self.runs.append("forget")

    def run(self, num_rows, drawing):
        self.runs.append((num_rows, drawing))


def out_of_memory(num_rows, drawing):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class TestWhichGraph:
    def test_smallest_with_room(self):
        """
        A step takes the smallest graph with room for its rows; a further size is captured when
        asked for, none runs eagerly, and dropping leaves no graph.
        """
        graphs = DecodeGraphs(Idle(), plan((4, 2)))
        assert {None} == {graphs.size_for(rows) for rows in range(1, 7)}
        graphs.capture()
        assert [2, 2, 4, 4, None, None] == [graphs.size_for(rows) for rows in range(1, 7)]
        graphs.add(5)
        assert [2, 2, 4, 4, 5, None] == [graphs.size_for(rows) for rows in range(1, 7)]
        graphs.drop()
        assert {None} == {graphs.size_for(rows) for rows in range(1, 7)}

    def test_only_what_was_dropped_is_restored(self):
        """
        Restoring captures anew what a drop took, the sizes added later among it, and nothing
        otherwise.
        """
        graphs = DecodeGraphs(Idle(), plan((4, 2)))
        graphs.restore()
        graphs.drop()
        graphs.restore()
        assert 0 == graphs.num_captures
        graphs.capture()
        graphs.add(5)
        graphs.restore()
        assert 1 == graphs.num_captures
        graphs.drop()
        graphs.drop()
        graphs.restore()
        assert 2 == graphs.num_captures
        assert [2, 4, 5] == [graphs.size_for(rows) for rows in (1, 3, 5)]

    def test_largest_are_captured_first_with_no_rows(self):
        """
        Captures go from the largest size down, through every way of drawing, between two moments
        without rows.
        """
        step = Idle()
        DecodeGraphs(step, plan((2, 5))).capture()
        assert ("forget", "forget") == (step.runs[0], step.runs[-1])
        assert [5, 5, 5, 2, 2, 2] == [num_rows for num_rows, _ in step.runs[1:-1]]
        assert 6 == len(set(step.runs[1:-1]))

    def test_capture_without_memory_names_the_settings(self):
        """
        A device that runs out of memory in a capture gives a typed error with what to turn.
        """
        step = Idle()
        step.run = out_of_memory
        with pytest.raises(OutOfMemory, match="lower num_cuda_graphs or max_batch_size"):
            DecodeGraphs(step, plan((1,))).capture()

    @pytest.mark.parametrize("num_rows", [0, -1, 7])
    def test_sizes_beyond_the_batch_are_refused(self, num_rows):
        """
        A graph has at least one row and no more than a step.
        """
        graphs = DecodeGraphs(Idle(), plan(()))
        with pytest.raises(InvalidConfig, match=rf"1 to max_batch_size \(6\) rows, got {num_rows}"):
            graphs.add(num_rows)
