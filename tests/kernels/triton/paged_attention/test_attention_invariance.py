"""Attention on a GPU with bits that depend on neither batch nor chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.paged_attention import AttentionShape, reference, triton_plan
from tests.kernels import chunked_attention
from tests.kernels.chunked_attention import (
    SCALE,
    attended_at_once,
    attended_in_chunks,
    invariant,
)
from tests.kernels.test_paged_attention import scene, shape

pytestmark = pytest.mark.usefixtures("rows_alone_in_products")

TOLERANCE = 3e-3
"""Two roundings to float16 of outputs near 1."""

SHAPES = [
    pytest.param(shape(2, 1, 64, 16, torch.float16), id="mqa2-d64-b16"),
    pytest.param(shape(3, 1, 80, 7, torch.float16), id="mqa3-d80-b7", marks=pytest.mark.slow),
]
WINDOWS = [pytest.param(24, id="w24"), pytest.param(None, id="full", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten sequences to three tiles of keys: the interpreter takes time for each tile."""
    monkeypatch.setattr(chunked_attention, "LENGTHS", (140, 12, 9))


CUTS = {"chunks": [1, 40, 1, 33, 1, 2, 62], "among others": [140]}


def on(device: torch.device, of: AttentionShape) -> AttentionShape:
    return replace(invariant(of), device=device)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("of", SHAPES)
class TestInvariance:
    @pytest.mark.slow
    def test_queries_have_the_same_bits_in_any_chunk_among_any_rows(self, of, window, device):
        """
        140 queries in uneven chunks, decodes among them, after two other rows have the bits of one chunk alone.
        """
        plan = planner(device)
        expected = attended_at_once(plan, invariant(of), window)
        for name, cuts in CUTS.items():
            assert torch.equal(expected, attended_in_chunks(plan, invariant(of), window, cuts)), (
                name
            )
        definition = attended_at_once(reference.plan, of, window)
        assert (definition.float() - expected.float()).abs().max() <= TOLERANCE

    def test_resident_decodes_have_the_bits_of_chunks(self, of, window, device):
        """
        Decodes with lengths on the device, padding among them, have the bits that they have in
        chunks, whenever the plan runs.
        """
        sequences, query, cache = scene([(1, 70), (1, 3), (1, 65)], of)
        batch = planner(device)(sequences, invariant(of), window)
        expected = batch.attend(query, cache, SCALE)
        seq_len = torch.zeros(4, dtype=torch.int32, device=device)
        table = np.pad(sequences.block_table, ((0, 1), (0, 0)))
        plan = triton_plan.plan_resident_decodes(
            torch.from_numpy(table).to(device), seq_len, on(device, of), window
        )
        seq_len[:3] = torch.from_numpy(sequences.seq_len).to(device)
        found = plan.attend(torch.cat((query, query[:1])).to(device), cache.to(device), SCALE).cpu()
        assert torch.equal(expected, found[:3])
        assert torch.equal(torch.zeros_like(found[3]), found[3])


def planner(device: torch.device) -> chunked_attention.Planner:
    """Return a planner for the device; results of its plans come back to the CPU."""

    class Moved:
        def __init__(self, plan: triton_plan.TritonPlan) -> None:
            self.plan = plan

        def attend(self, query: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
            return self.plan.attend(query.to(device), cache.to(device), scale).cpu()

    return lambda sequences, of, window: Moved(
        triton_plan.plan(sequences, replace(of, device=device), window)
    )
