"""Launches of row-wise kernels: what is compiled must not depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.patch_rows import triton_kernel as patch_triton
from kernels.rms_norm import triton_kernel as norm_triton
from kernels.rope_kv_write import triton_kernel as rope_triton
from kernels.silu_mul import triton_kernel as gate_triton
from tests.kernels.triton.row_wise.elementwise import RopeScene, numbers

BATCHES = (1, 2, 7, 16, 33)


class Recorder:
    """Stands for a kernel: keeps grids and what is known when the kernel is compiled."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        self.grids.append(grid)
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        self.constants.append(constants)


def single_rows_cut_out(batch: int, width: int) -> torch.Tensor:
    """Return a batch; a single row is cut out of others, so that its stride is not its width."""
    return numbers(batch, width) if batch > 1 else numbers(9, width)[::5][:1]


LAUNCHES = {
    "norm": (
        norm_triton,
        "_rms_norm_kernel",
        lambda batch: norm_triton.rms_norm(single_rows_cut_out(batch, 80), numbers(80), 1e-5),
    ),
    "add-norm": (
        norm_triton,
        "_rms_norm_kernel",
        lambda batch: norm_triton.add_rms_norm(
            numbers(batch, 80), single_rows_cut_out(batch, 80), numbers(80), 1e-5
        ),
    ),
    "gate": (
        gate_triton,
        "_silu_mul_kernel",
        lambda batch: gate_triton.silu_mul(single_rows_cut_out(batch, 160)),
    ),
    "rope": (
        rope_triton,
        "_rope_kv_write_kernel",
        lambda batch: RopeScene.of(list(range(batch))).run(rope_triton.rope_kv_write),
    ),
    "patch": (
        patch_triton,
        "_patch_rows_kernel",
        lambda batch: patch_triton.patch_rows(torch.zeros(9).int(), torch.zeros(2, batch).int()),
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_all_batches_run_one_compiled_kernel(name: str, monkeypatch: pytest.MonkeyPatch):
    """
    A kernel is compiled for the model, not for the number of rows or how one row was cut out.
    """
    module, kernel, launch = LAUNCHES[name]
    recorder = Recorder()
    monkeypatch.setattr(module, kernel, recorder)
    for batch in BATCHES:
        launch(batch)
    assert len(BATCHES) == len(recorder.constants)
    assert recorder.constants[:1] * len(BATCHES) == recorder.constants
