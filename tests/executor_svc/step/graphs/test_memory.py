"""Memory that captured steps need when the device's memory is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_svc.config.settings import load_settings
from executor_svc.device.memory_probe import Reading
from executor_svc.memory.decode_bytes import graph_pool_bytes
from executor_svc.memory.plan import Readings, plan_memory
from executor_svc.model.config import read_model_config
from executor_svc.step.decode_graphs import DecodeGraphs
from executor_svc.step.graphs.plan import GraphPlan
from tests.executor_svc.step.graphs.recorded import RecordedGraphs
from tests.executor_svc.stepping import Bench

Zoo = Callable[[str], Path]


def activation_bytes(directory, device, num_cuda_graphs, measured=None):
    argv = ["--model", str(directory), "--max-batch-size=16", "--num-cuda-graphs", num_cuda_graphs]
    loaded = load_settings(argv, {})
    reading = Reading(total=1 << 40, free=1 << 40, used=0)
    plan = plan_memory(
        loaded,
        read_model_config(directory),
        loaded.limits,
        torch.bfloat16,
        Readings(before=reading, after=reading, weight_bytes=0),
        device=device,
        measured=measured,
    )
    return plan.rank.probe.activation_bytes


@pytest.mark.parametrize("measured", [None, 1 << 32], ids=["estimated", "measured"])
def test_pool_is_planned_for_where_graphs_are_captured(zoo: Zoo, measured):
    """
    On a GPU the pool of the largest graph is added to the activations, estimated or measured; not
    without graphs, and not on a CPU.
    """
    directory = zoo("llama_mha")
    without = activation_bytes(directory, "cuda:0 H200", "none", measured)
    expected = graph_pool_bytes(read_model_config(directory), 16, torch.bfloat16)
    assert expected > 0
    for count in ("default", "1", "-1"):
        found = activation_bytes(directory, "cuda:0 H200", count, measured)
        assert without + expected == found
    assert activation_bytes(directory, "cpu", "none") == activation_bytes(directory, "cpu", "-1")


def test_estimate_is_no_more_than_all_that_a_step_allocates(zoo: Zoo):
    """
    Beside attention's scratch, which depends on the kernel, the pool of a step is estimated within
    what it allocates in all: memory used again is not counted twice.
    """
    bench = Bench.build(zoo("llama_mha"), num_slots=6, max_model_len=16, static_rows=6)
    step = bench.runner._static.step
    report = DecodeGraphs(step, GraphPlan(device=RecordedGraphs(), sizes=(6,))).capture()
    config = read_model_config(zoo("llama_mha"))
    estimated = graph_pool_bytes(config, 6, torch.float32)
    logits = 6 * config.vocab_size * 4
    assert logits < estimated < report.num_bytes


@pytest.mark.parametrize(("rows", "searched"), [(16, 16), (300, 256)])
def test_pool_has_room_for_the_search_of_thresholds(zoo: Zoo, rows: int, searched: int):
    """
    A graph that draws by top_k or top_p holds four bytes per id beside its logits, of as many rows as are searched together.
    """
    config = replace(read_model_config(zoo("llama_mha")), vocab_size=151936)
    logits = rows * config.vocab_size * 2
    keys = searched * config.vocab_size * 4
    assert logits + keys < graph_pool_bytes(config, rows, torch.bfloat16)
    other = graph_pool_bytes(replace(config, vocab_size=151937), rows, torch.bfloat16)
    assert rows * 2 + searched * 4 == other - graph_pool_bytes(config, rows, torch.bfloat16)
