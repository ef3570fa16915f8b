"""Captured steps with prompts, against steps with inputs that the host makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.step.batch_inputs import decoder_inputs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import graph_shapes
from executor_svc.step.mixed_step import MixedStep
from executor_svc.step.static_step import DecodeStep
from tandem.link.commands import KvMode
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.step.test_static_step import FILTERED, NOISY, PENALISED, TOLD, is_same
from tests.executor_svc.stepping import GREEDY, Bench, Row, admission, batch, random_tokens

Zoo = Callable[[str], Path]

NUM_SLOTS = 6
SHAPES = graph_shapes([24, 12], max_requests=24, max_sequence_length=64, mixed_prefill_count=3)
"""Shapes of 24 and 12 tokens: 3 prefills and decodes, and as many prefills as tokens."""


class Twins:
    """The same model and memory twice: every step eager, and steps of prompts captured too."""

    def __init__(self, directory, *, shapes=SHAPES, **options):
        plan = GraphPlan(
            device=RecordedGraphs(),
            sizes=(NUM_SLOTS,),
            mixed=tuple(shape for shape in shapes if shape.num_prefills),
        )
        same = {"block_size": 7, "num_blocks": 64, "num_slots": NUM_SLOTS, "max_model_len": 64}
        same |= {"shuffle_seed": 3} | options
        self.eager = Bench.build(directory, **same)
        self.graphed = Bench.build(directory, static_rows=NUM_SLOTS, graph_plan=plan, **same)
        self.graphed.runner.warm_up()
        self.num_steps = 0

    def run(self, *rows, **parts):
        """Run a step on both, with the same outcome; gives the tokens of the graph that did it."""
        self.num_steps += 1
        step = batch(*rows, **parts)
        eager = self.eager.runner.execute(step, self.num_steps)
        graphed = self.graphed.runner.execute(step, self.num_steps)
        assert is_same(eager, graphed)
        return graphed.graph

    def admit(self, slot, num_tokens, sampling=GREEDY, **options):
        tokens = random_tokens(num_tokens, seed=slot)
        blocks = self.eager.take_blocks(num_tokens + 12)
        return admission(slot, tokens, blocks, sampling=sampling, **options)


@pytest.fixture
def twins(zoo: Zoo) -> Twins:
    """Build twins with steps of 12 tokens, 3 prefills and decodes."""
    return Twins(zoo("llama_mha"), shapes=SHAPES[3:4])


class TestSteps:
    def test_prompts_and_decodes_run_in_the_smallest_graph_with_room(self, zoo: Zoo):
        """
        Prompts alone, in chunks, with decodes and of several rows get the tokens of eager steps;
        what has more tokens than any graph runs eagerly.
        """
        twins = Twins(zoo("qwen2_window"))
        admits = [twins.admit(0, 5), twins.admit(1, 7, NOISY)]
        assert 12 == twins.run(Row(0, 0, 5), Row(1, 0, 7), admits=admits)
        assert 12 == twins.run(
            Row(0, 5), Row(1, 7), Row(2, 0, 9), admits=[twins.admit(2, 9, FILTERED)]
        )
        chunk = Row(3, 0, 11, samples=False)
        admits = [twins.admit(3, 30, NOISY)]
        assert 24 == twins.run(Row(0, 6), Row(1, 8), Row(2, 9), chunk, admits=admits)
        assert 24 == twins.run(Row(0, 7), Row(1, 9), Row(2, 10), Row(3, 11, 19))
        assert NUM_SLOTS == twins.run(Row(0, 8), Row(1, 10), Row(2, 11), Row(3, 30))
        assert 0 == twins.run(Row(4, 0, 25), admits=[twins.admit(4, 25)])
        assert NUM_SLOTS == twins.run(Row(0, 9), Row(3, 31), Row(4, 25))

    def test_chunks_that_sample_nothing_have_an_empty_result(self, twins):
        """
        A step may compute prompts alone that go on in the next one.
        """
        chunk = Row(0, 0, 6, samples=False)
        assert 12 == twins.run(chunk, admits=[twins.admit(0, 16, NOISY)])
        assert 12 == twins.run(Row(0, 6, 10))
        assert NUM_SLOTS == twins.run(Row(0, 16))

    @pytest.mark.parametrize("asking", [PENALISED, TOLD], ids=["penalties", "logprobs"])
    def test_rows_that_ask_for_more_keep_their_step_out(self, twins, asking):
        """
        Penalties and log probabilities need eager steps; the others' come in graphs again.
        """
        assert 0 == twins.run(Row(0, 0, 5), admits=[twins.admit(0, 5, asking)])
        assert 12 == twins.run(Row(1, 0, 5), admits=[twins.admit(1, 5)])

    def test_margins_keep_all_steps_out(self, zoo: Zoo):
        """
        Steps with prompts run eagerly when every token is told its margin.
        """
        twins = Twins(zoo("llama_mha"), shapes=SHAPES[:1], collect_margins=True)
        assert 0 == twins.run(Row(0, 0, 5), admits=[twins.admit(0, 5)])

    def test_a_bad_row_fails_alone(self, twins):
        """
        NaN among one sequence's keys is that row's error, in a graph as in an eager step.
        """
        admits = [twins.admit(0, 5), twins.admit(1, 7)]
        twins.run(Row(0, 0, 5), Row(1, 0, 7), admits=admits)
        for bench in (twins.eager, twins.graphed):
            for layer in bench.kv.layers:
                layer[int(admits[0].block_ids[0]), 1] = float("nan")
        assert 12 == twins.run(Row(0, 5), Row(1, 7), Row(2, 0, 3), admits=[twins.admit(2, 3)])

    def test_memory_that_was_given_back_is_captured_anew(self, twins):
        """
        Sequences go on after an offload, in graphs of both kinds.
        """
        twins.run(Row(0, 0, 5), admits=[twins.admit(0, 5, NOISY)])
        for bench in (twins.eager, twins.graphed):
            bench.runner.suspend(KvMode.OFFLOAD)
            bench.runner.resume()
        assert 12 == twins.run(Row(0, 5), Row(1, 0, 4), admits=[twins.admit(1, 4)])
        assert NUM_SLOTS == twins.run(Row(0, 6), Row(1, 4))


def test_padding_touches_no_live_block(twins):
    """
    A step writes the positions of its tokens and, for padding, the dummy block; the rest of the
    cache stays as it was, NaN where never written.
    """
    admits = [twins.admit(0, 5), twins.admit(1, 7)]
    layers = twins.graphed.kv.layers
    before = [layer.clone() for layer in layers]
    twins.run(Row(0, 0, 5), Row(1, 0, 7), admits=admits)
    written = {0, *(int(each.block_ids[0]) for each in admits)}
    kept = [block for block in range(len(layers[0])) if block not in written]
    for was, layer in zip(before, layers, strict=True):
        assert was[kept].isnan().equal(layer[kept].isnan())
        assert layer[int(admits[0].block_ids[0]), 5:].isnan().all()
        assert layer[int(admits[0].block_ids[0]), :5].isfinite().all()


@pytest.mark.parametrize("kind", ["inputs-sent", "static", "mixed"])
class TestTimes:
    def test_work_of_the_host_before_a_launch_is_none_of_the_device(
        self, zoo: Zoo, monkeypatch, kind
    ):
        """
        However long a step's application and inputs take, the forward pass lasts as long as the model computes.
        """
        clock = {"ns": 0}

        def slow(call, ns):
            def run(*args, **options):
                clock["ns"] += ns
                return call(*args, **options)

            return run

        twins = Twins(zoo("llama_mha"), clock_ns=lambda: clock["ns"])
        bench = twins.eager if kind == "inputs-sent" else twins.graphed
        num_tokens = 1 if kind == "static" else 3
        admit = bench.admit(0, random_tokens(num_tokens, seed=0))
        runner = bench.runner
        monkeypatch.setattr(runner, "_apply", slow(runner._apply, 1000))
        for cls in (DecodeStep, MixedStep):
            monkeypatch.setattr(cls, "prepare", slow(cls.prepare, 100))
        inputs = "executor_svc.step.runner.decoder_inputs"
        monkeypatch.setattr(inputs, slow(decoder_inputs, 100))
        monkeypatch.setattr(runner._decoder, "forward", slow(runner._decoder.forward, 7))
        result = runner.execute(batch(Row(0, 0, num_tokens), admits=[admit]), 1)
        assert (result.graph > 0) == (kind != "inputs-sent")
        assert 1107 == clock["ns"]
        assert (7, 0, 7) == (
            result.timings.forward_ns,
            result.timings.sample_ns,
            result.timings.total_ns,
        )
