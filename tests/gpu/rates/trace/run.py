"""Recordings of all kinds of steps of some models, printed as they are made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from executor_svc.device.out_of_memory import is_out_of_memory
from executor_svc.step.graphs.cuda import CudaGraphs
from tandem.errors import OutOfMemory
from tandem_bench.device.json_rows import JsonRows
from tandem_bench.device.options import complain
from tandem_bench.device.shapes import SHAPES
from tandem_bench.model.random_model import forget_memory, random_model
from tests.gpu.rates.trace.steps import Kind, record

CONTEXT = 1024
_BATCHES = (1, 32, 256)
_CHUNK = 256


def record_all(
    models: Sequence[str],
    *,
    device_name: str,
    tiny: bool,
    folder: Path | None,
    deadline_s: float,
) -> int:
    """
    Record all kinds of steps and print a row for each; return the exit code.

    Args:
        models: Names in `SHAPES`.
        device_name: "cuda" or "cpu".
        tiny: Record a few short steps, for a CPU.
        folder: Folder for traces; None keeps none.
        deadline_s: Time by `time.monotonic` after which nothing begins.
    """
    device = torch.device(device_name)
    graphs = CudaGraphs(device) if device.type == "cuda" else None
    dtype = torch.float32 if tiny else torch.bfloat16
    num_rows = 0
    with JsonRows() as rows:
        for name in models:
            forget_memory(device)
            if time.monotonic() > deadline_s:
                complain("trace", f"{name} left out, the time is over")
                continue
            model = random_model(SHAPES[name], dtype, device, packs=True)
            for kind in _kinds(tiny=tiny):
                text = _text(kind)
                if time.monotonic() > deadline_s:
                    complain("trace", f"{name} {text} left out, the time is over")
                    continue
                forget_memory(device)
                try:
                    found = record(model, kind, graphs, folder, f"{name}-{text}")
                except (OutOfMemory, RuntimeError) as error:
                    if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                        raise
                    complain("trace", f"{name} {text} does not fit")
                    continue
                place = {"model": name, "steps": text, "rows": kind.num_rows}
                rows.add({**place, "chunk": kind.chunk, "context": kind.context, **found})
                num_rows += 1
            del model  # it makes room before the next is made
    return 0 if num_rows else 1


def _kinds(*, tiny: bool) -> Iterator[Kind]:
    if tiny:
        yield Kind(num_rows=2, context=20, is_captured=False)
        yield Kind(num_rows=2, context=20, is_captured=False, chunk=5)
        return
    for num_rows in _BATCHES:
        yield Kind(num_rows=num_rows, context=CONTEXT, is_captured=True)
    for num_rows in _BATCHES[:2]:
        yield Kind(num_rows=num_rows, context=CONTEXT, is_captured=False)
    for is_captured in (True, False):
        yield Kind(num_rows=32, context=CONTEXT, is_captured=is_captured, chunk=_CHUNK)


def _text(kind: Kind) -> str:
    what = f"mixed-{kind.num_rows}+{kind.chunk}" if kind.chunk else f"decode-{kind.num_rows}"
    return f"{what}-{'captured' if kind.is_captured else 'eager'}"
