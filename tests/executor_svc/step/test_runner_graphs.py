"""
A runner with captured graphs for its decode steps, against one that takes every step eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.memory import kv_memory
from executor_svc.step.graphs.capture import Graphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.runner import ModelRunner
from tandem.errors import InvalidConfig, OutOfMemory, SessionLost
from tandem.link.commands import KvMode
from tandem.sampling_params import SamplingParams
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.step.graphs.recording import GraphChanged
from tests.executor_svc.step.test_static_step import (
    FILTERED,
    NOISY,
    NUM_SLOTS,
    PENALISED,
    TOLD,
    Traffic,
    is_same,
)
from tests.executor_svc.stepping import GREEDY, Bench, Row, admission, batch, random_tokens

Zoo = Callable[[str], Path]


class Twins:
    """The same model and memory twice: every step eager, and decodes in graphs of 5 and 2 rows."""

    def __init__(self, directory, *, sizes=(5, 2), warm=True, keeps_addresses=False):
        self.eager, self.graphed = (
            Bench.build(
                directory,
                block_size=7,
                num_blocks=64,
                num_slots=NUM_SLOTS,
                shuffle_seed=3,
                max_model_len=64,
                keeps_addresses=keeps_addresses,
                static_rows=static_rows,
                graph_plan=plan,
            )
            for static_rows, plan in (
                (0, None),
                (NUM_SLOTS, GraphPlan(device=RecordedGraphs(), sizes=sizes)),
            )
        )
        if warm:
            self.graphed.runner.warm_up()
        self.traffic = Traffic(self.eager.block_ids)
        self.num_steps = 0

    @property
    def num_captures(self):
        return self.graphed.runner._graphs.num_captures

    def run(self, step):
        """Run a step on both, with the same outcome; gives the rows of its graph, 0 for none."""
        self.num_steps += 1
        eager = self.eager.runner.execute(step, self.num_steps)
        graphed = self.graphed.runner.execute(step, self.num_steps)
        assert is_same(eager, graphed)
        assert 0 == eager.graph
        return graphed.graph

    def start_anew(self):
        """Make both forget their sequences, as for a new session."""
        for bench in (self.eager, self.graphed):
            bench.runner.reset()
        self.traffic = Traffic(self.eager.block_ids)

    def join(self, *samplings: SamplingParams):
        """Admit one sequence after another, each with its own length; no graph runs."""
        first = len(self.traffic.length)
        for slot, sampling in enumerate(samplings, start=first):
            assert 0 == self.run(self.traffic.join(slot, 3 + 4 * slot, sampling))


@pytest.fixture
def directory(zoo: Zoo) -> Path:
    return zoo("qwen3")


class TestSteps:
    def test_decodes_run_in_graphs_and_prompts_do_not(self, directory):
        """
        A result tells the rows of the graph that computed it: the smallest with room; steps with
        prompts, and decodes of more rows than any graph has, run eagerly; tokens are the same.
        """
        twins = Twins(directory)
        twins.join(GREEDY)
        assert 2 == twins.run(twins.traffic.decode())
        twins.join(NOISY)
        assert 2 == twins.run(twins.traffic.decode())
        twins.join(FILTERED, NOISY, GREEDY)
        assert [5, 5] == [twins.run(twins.traffic.decode()) for _ in range(2)]
        twins.join(FILTERED)
        assert 0 == twins.run(twins.traffic.decode())
        twins.traffic.leave(1)
        twins.traffic.leave(4)
        assert 5 == twins.run(twins.traffic.decode([5, 0, 2, 3]))
        assert 1 == twins.num_captures

    @pytest.mark.slow
    @pytest.mark.parametrize("asking", [PENALISED, TOLD], ids=["penalties", "logprobs"])
    def test_rows_that_ask_for_more_are_drawn_from_the_graphs_logits(self, directory, asking):
        """
        Penalties and log probabilities are worked out beside the graph, which serves all rows with
        its forward pass; the next step goes on from their tokens.
        """
        twins = Twins(directory)
        twins.join(NOISY, asking)
        assert [2, 2, 2] == [twins.run(twins.traffic.decode()) for _ in range(3)]

    def test_new_session_starts_from_nothing(self, directory):
        """
        After a reset other sequences in the same slots get their own tokens from the same graphs.
        """
        twins = Twins(directory)
        twins.join(GREEDY, NOISY)
        twins.run(twins.traffic.decode())
        twins.start_anew()
        twins.join(NOISY, FILTERED, GREEDY)
        assert [5, 5] == [twins.run(twins.traffic.decode()) for _ in range(2)]
        assert 1 == twins.num_captures


class TestWarmUp:
    def test_steps_run_again_after_the_last_capture(self, directory, monkeypatch):
        """
        Captures give back the memory that PyTorch keeps for steps, so a warm-up runs its steps before and after them, the latter in graphs; slots are empty at the end. Where nothing is captured they run once.
        """
        twins = Twins(directory, warm=False)
        order = []
        execute, capture = ModelRunner.execute, Graphs.capture

        def executed(self, *given):
            result = execute(self, *given)
            order.append(result.graph)
            return result

        def captured(self):
            order.append("capture")
            return capture(self)

        monkeypatch.setattr(ModelRunner, "execute", executed)
        monkeypatch.setattr(Graphs, "capture", captured)
        twins.graphed.runner.warm_up()
        assert [0, 0, "capture", 0, 2] == order
        assert not twins.graphed.runner.slots.live.any()
        order.clear()
        twins.eager.runner.warm_up()
        assert [0, 0] == order


class TestSuspension:
    @pytest.mark.parametrize(("mode", "num_captures"), [(KvMode.PERSIST, 1), (KvMode.OFFLOAD, 2)])
    def test_sequences_go_on_after_it(self, directory, mode, num_captures):
        """
        Graphs are kept where KV memory stays, and captured anew where it was given back; sequences
        in the middle of their output go on with the same tokens.
        """
        twins = Twins(directory)
        twins.join(NOISY, GREEDY)
        twins.run(twins.traffic.decode())
        for bench in (twins.eager, twins.graphed):
            bench.runner.suspend(mode)
            bench.runner.suspend(mode)
            bench.runner.resume()
            bench.runner.resume()
        assert num_captures == twins.num_captures
        assert [2, 2] == [twins.run(twins.traffic.decode()) for _ in range(2)]

    @pytest.mark.parametrize("mode", [KvMode.OFFLOAD, KvMode.RECOMPUTE], ids=lambda mode: mode.name)
    def test_graphs_are_kept_where_memory_comes_back_at_its_address(self, directory, mode):
        """
        With static memory pointers nothing is captured anew, whatever becomes of the contents: each layer is where it was,
        and the same graphs serve what goes on, or begins, after the suspension.
        """
        twins = Twins(directory, keeps_addresses=True)
        twins.join(NOISY, GREEDY)
        twins.run(twins.traffic.decode())
        if mode is KvMode.RECOMPUTE:  # which takes nothing from live sequences
            twins.start_anew()
        before = [layer.data_ptr() for layer in twins.graphed.kv.layers]
        for bench in (twins.eager, twins.graphed):
            bench.runner.suspend(mode)
            assert 0 == bench.kv.device_bytes
            bench.runner.resume()
        assert before == [layer.data_ptr() for layer in twins.graphed.kv.layers]
        if mode is KvMode.RECOMPUTE:
            twins.join(NOISY, GREEDY)
        assert [2, 2] == [twins.run(twins.traffic.decode()) for _ in range(2)]
        assert 1 == twins.num_captures

    def test_refused_suspension_leaves_graphs_as_they_were(self, directory, monkeypatch):
        """
        Where the host has no room for OFFLOAD the next decodes still run in the graphs, on the same memory.
        """
        twins = Twins(directory)
        twins.join(NOISY, GREEDY)
        monkeypatch.setattr(kv_memory, "available_bytes", lambda _device: 0)
        with pytest.raises(OutOfMemory, match="OFFLOAD"):
            twins.graphed.runner.suspend(KvMode.OFFLOAD)
        assert not twins.graphed.kv.is_suspended
        assert 2 == twins.run(twins.traffic.decode())
        assert 1 == twins.num_captures

    def test_memory_that_moves_unannounced_is_noticed(self, directory):
        """
        A replay is refused if graphs were kept although KV memory came to lie elsewhere.
        """
        twins = Twins(directory)
        twins.join(GREEDY)
        for layer in twins.graphed.kv.layers:
            storage = layer.untyped_storage()
            storage.resize_(2 * storage.nbytes())
        with pytest.raises(GraphChanged, match="has moved since the graph was captured"):
            twins.graphed.runner.execute(twins.traffic.decode(), 9)


class TestByHand:
    def test_graphs_can_be_captured_one_by_one(self, directory):
        """
        Without a list a step of the API runs in no graph until one with room for it is captured.
        """
        twins = Twins(directory, sizes=(), warm=False)
        runner = twins.graphed.runner
        runner.execute(batch(Row(0, 0, 3), admits=[admission(0, [1, 2, 3], [1, 2])]), 1)
        decode = batch(Row(0, 3))
        assert not runner.has_decode_graph(decode)
        runner.capture_decode_graph(3)
        assert runner.has_decode_graph(decode)
        assert 3 == runner.execute(decode, 2).graph
        runner.capture_decode_graph(1)
        assert 1 == runner.execute(batch(Row(0, 4)), 3).graph

    def test_prompts_have_no_graph(self, directory):
        """
        A batch with prompt tokens has no graph of decodes, and looking for one changes nothing.
        """
        runner = Twins(directory).graphed.runner
        prompt = batch(Row(0, 0, 5), admits=[admission(0, random_tokens(5, seed=1), [1])])
        assert not runner.has_decode_graph(prompt)
        assert 0 == runner.state_hash

    def test_impossible_captures_are_refused(self, directory):
        """
        No graph has no rows, or more than a step has; a suspended executor captures none, and one
        that runs eagerly never does.
        """
        twins = Twins(directory, sizes=(), warm=False)
        for num_rows in (0, NUM_SLOTS + 1):
            with pytest.raises(InvalidConfig, match=f"rows, got {num_rows}"):
                twins.graphed.runner.capture_decode_graph(num_rows)
        with pytest.raises(InvalidConfig, match="captures no graphs"):
            twins.eager.runner.capture_decode_graph(1)
        twins.graphed.runner.suspend(KvMode.RECOMPUTE)
        with pytest.raises(SessionLost, match="resume first"):
            twins.graphed.runner.capture_decode_graph(1)
