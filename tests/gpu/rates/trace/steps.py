"""Steps that are recorded: steady decodes, alone or beside a prompt's chunks."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.autograd.profiler import profile

from executor_svc.model.loader import LoadedModel
from executor_svc.step.graphs.capture import GraphDevice
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.graphs.shapes import GraphShape
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import ROW_SAMPLES, Batch
from tandem.link.results import StepResult
from tandem_bench.model.random_model import random_kv
from tandem_bench.model.steady_decode import greedy_admissions
from tests.gpu.rates.trace.events import spans_of, summary

WARM_STEPS = 3
RECORDED_STEPS = 4
_BLOCK_SIZE = 16
_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """
    Steps of one kind.

    Attributes:
        num_rows: Rows that decode.
        context: Positions of each of them, about.
        is_captured: Steps are replayed from a graph, on a device that has them.
        chunk: Positions of a prompt that each step computes too; 0 for decodes alone.
    """

    num_rows: int
    context: int
    is_captured: bool
    chunk: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a step."""
        return self.num_rows + self.chunk


def record(
    model: LoadedModel, kind: Kind, graphs: GraphDevice | None, folder: Path | None, name: str
) -> dict[str, Any]:
    """
    Record some steps of a kind; return their figures.

    Args:
        model: Model that computes.
        kind: Steps to record.
        graphs: Device that captures; None where there is none.
        folder: Folder for the trace, compressed; None keeps none.
        name: Name of its file, without a suffix.

    Raises:
        OutOfMemory: Cache or step do not fit.
    """
    num_steps = WARM_STEPS + RECORDED_STEPS
    longest = max(kind.context + num_steps + 1, num_steps * kind.chunk + 1)
    blocks_per_row = -(-longest // _BLOCK_SIZE)
    num_slots = kind.num_rows + (1 if kind.chunk else 0)
    on_device = model.device.type == "cuda"
    runner = ModelRunner(
        model,
        random_kv(model, num_slots * blocks_per_row, _BLOCK_SIZE),
        num_slots=num_slots,
        max_model_len=longest,
        boot_id="trace",
        static_rows=num_slots if on_device or graphs is not None else 0,
        graph_plan=_plan(kind, graphs) if kind.is_captured and graphs is not None else None,
    )
    runner.warm_up(every_kind=False)
    batches = step_batches(kind, blocks_per_row, model.config.vocab_size)
    for step_id in range(WARM_STEPS):
        runner.execute(next(batches), step_id)
    recorder: Any = profile(use_kineto=True, use_device="cuda" if on_device else None)
    with recorder:
        started_s = time.perf_counter()
        result = _run(runner, batches, in_flight=_IN_FLIGHT if on_device else 1)
        wall_us = 1e6 * (time.perf_counter() - started_s) / RECORDED_STEPS
    figures = summary(spans_of(_read(recorder, folder, name), on_device=on_device), RECORDED_STEPS)
    return {"graph": result.graph, "wall_us": round(wall_us, 2), **figures}


def _plan(kind: Kind, graphs: GraphDevice) -> GraphPlan:
    mixed = (GraphShape(kind.num_tokens, 1, kind.num_rows),) if kind.chunk else ()
    return GraphPlan(device=graphs, sizes=(kind.num_rows,), mixed=mixed)


def _run(runner: ModelRunner, batches: Iterator[Batch], *, in_flight: int) -> StepResult:
    """Run the recorded steps, so many of them launched before results are waited for."""
    launched: list[Callable[[], StepResult]] = []
    for step_id, batch in enumerate(batches, WARM_STEPS):
        launched.append(runner.launch(batch, step_id))
        if len(launched) >= in_flight:
            result = launched.pop(0)()
    for wait in launched:
        result = wait()
    return result


def _read(recorder: Any, folder: Path | None, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:
        path = Path(own) / "trace.json"
        recorder.export_chrome_trace(str(path))
        content = path.read_bytes()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(content, 6))
    trace: dict[str, Any] = json.loads(content)
    return trace


def step_batches(kind: Kind, blocks_per_row: int, vocab_size: int) -> Iterator[Batch]:
    """Yield the batches of all steps: each decodes every row, and computes a prompt's next chunk."""
    num_steps, chunk = WARM_STEPS + RECORDED_STEPS, kind.chunk
    lengths = [(kind.context, kind.context - 1)] * kind.num_rows
    lengths += [(num_steps * chunk + 1, 0)] * bool(chunk)
    admits = greedy_admissions(lengths, blocks_per_row, vocab_size)
    cached = np.array([num_cached for _, num_cached in lengths], np.int32)
    per_row = np.array([1] * kind.num_rows + [chunk] * bool(chunk), np.int32)
    flags = np.array([ROW_SAMPLES] * kind.num_rows + [0] * bool(chunk), np.uint8)
    for step in range(num_steps):
        yield Batch(
            admits=admits if step == 0 else (),
            row_slot=np.arange(len(lengths), dtype=np.int32),
            row_num_tokens=per_row,
            row_start=cached + step * per_row,
            row_flags=flags,
        )
