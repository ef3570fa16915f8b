"""Decode steps as the benchmark drives them: what runs, not how long it takes."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from executor_svc.model.loader import LoadedModel
from tandem_bench.device.shapes import SHAPES
from tandem_bench.model import steady_decode
from tandem_bench.model.random_model import random_kv, random_model
from tandem_bench.model.steady_decode import decode_batches, measure_steps
from tests.executor_svc.step.graphs.recorded import RecordedGraphs

BLOCK_SIZE = 8
NUM_ROWS = 3


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model(SHAPES["tiny"], torch.float32, torch.device("cpu"))


def tokens(model: LoadedModel, *, graphs: RecordedGraphs | None, ahead: bool) -> list[list[int]]:
    kv = random_kv(model, NUM_ROWS * 5, BLOCK_SIZE)
    runner = steady_decode._runner(model, kv, NUM_ROWS, 40, graphs)
    batches = islice(decode_batches(NUM_ROWS, 20, 5, model.config.vocab_size), 6)
    results = list(steady_decode._results(runner, batches, launches_ahead=ahead))
    assert list(range(6)) == [result.step_id for result in results]
    return [result.token.tolist() for result in results]


class TestSteps:
    def test_all_rows_go_on_in_every_step(self, model):
        """
        Each step computes and draws one token of every row, over keys that are there from the start.
        """
        found = tokens(model, graphs=None, ahead=False)
        assert [NUM_ROWS] * 6 == [len(step) for step in found]
        assert len(set(found[0])) > 1

    def test_captured_steps_launched_ahead_draw_the_same(self, model):
        """
        Steps replayed from a captured graph, each launched before the last one's result, give the same tokens.
        """
        eager = tokens(model, graphs=None, ahead=False)
        assert eager == tokens(model, graphs=RecordedGraphs(), ahead=True)

    def test_graph_that_ran_is_told(self, model):
        """
        A measurement says which captured step it was, and 0 for none.
        """
        given = {"num_rows": 2, "context": 20, "block_size": BLOCK_SIZE, "budget_s": 0.0}
        assert 2 == measure_steps(model, **given, graphs=RecordedGraphs()).graph
        assert 0 == measure_steps(model, **given, graphs=None).graph
