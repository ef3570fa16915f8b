"""Attention with bits that depend on neither batch nor chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.paged_attention import AttentionShape, cpu, cpu_extension, reference
from tests.kernels.chunked_attention import (
    CUTS,
    SCALE,
    attended_at_once,
    attended_in_chunks,
    invariant,
)
from tests.kernels.test_paged_attention import scene, shape

PLANNERS = [
    pytest.param(cpu.plan, id="cpu"),
    pytest.param(cpu_extension.plan, id="cpu-extension", marks=pytest.mark.compiler),
    pytest.param(reference.plan, id="reference", marks=pytest.mark.slow),
]
SHAPES = [
    pytest.param(shape(9, 3, 64, 7, torch.bfloat16), id="gqa3-d64-b7-bf16"),
    pytest.param(shape(), id="gqa2-d8-b16", marks=pytest.mark.slow),
    pytest.param(shape(4, 1, 24, 16), id="mqa4-d24-b16", marks=pytest.mark.slow),
    pytest.param(shape(2, 2, 80, 1, torch.float16), id="mha-d80-b1-fp16", marks=pytest.mark.slow),
]
WINDOWS = [pytest.param(24, id="w24"), pytest.param(None, id="full", marks=pytest.mark.slow)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Room for the rounding of outputs near 1, and of probabilities."""


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("of", SHAPES)
class TestInvariance:
    @pytest.mark.parametrize("plan", PLANNERS)
    def test_queries_have_the_same_bits_in_any_chunk_among_any_rows(
        self, of: AttentionShape, window: int | None, plan
    ):
        """
        150 queries, one by one or in uneven chunks after two other rows, have the bits of one chunk alone.
        """
        expected = attended_at_once(plan, invariant(of), window)
        for name, cuts in CUTS.items():
            found = attended_in_chunks(plan, invariant(of), window, cuts)
            assert torch.equal(expected, found), name

    @pytest.mark.parametrize("plan", PLANNERS[:2])
    def test_values_are_those_of_the_definition(self, of, window, plan):
        """
        Attention that does not depend on the batch gives the values of the definition.
        """
        expected = attended_at_once(reference.plan, of, window)
        found = attended_at_once(plan, invariant(of), window)
        assert (expected.float() - found.float()).abs().max() <= TOLERANCE[of.dtype]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("plan", PLANNERS[:2])
class TestHeads:
    @pytest.mark.parametrize(
        "of",
        [
            pytest.param(shape(8, 4, 64, 16), id="gqa2-fp32"),
            pytest.param(shape(8, 2, 24, 16, torch.bfloat16), id="gqa4-bf16"),
            pytest.param(shape(4, 1, 80, 7, torch.float16), id="mqa4-fp16"),
        ],
    )
    def test_heads_of_two_and_four_ranks_have_the_bits_of_one(
        self, of: AttentionShape, window: int | None, plan
    ):
        """
        Some query heads with their key heads alone, or with one key head that others use too, have the
        bits that they have beside all others, in another number of threads.
        """
        sequences, query, cache = scene([(40, 61), (1, 150)], of)
        before = torch.get_num_threads()
        expected = plan(sequences, invariant(of), window).attend(query, cache, SCALE)
        try:
            for size in (2, 4):
                torch.set_num_threads(1 + size)
                heads, key_heads = of.num_heads // size, max(1, of.num_kv_heads // size)
                own = replace(of, num_heads=heads, num_kv_heads=key_heads)
                for rank in range(size):
                    first = rank * of.num_kv_heads // size
                    keys = cache[..., first : first + key_heads, :].contiguous()
                    queries = query[:, rank * heads : (rank + 1) * heads].contiguous()
                    found = plan(sequences, invariant(own), window).attend(queries, keys, SCALE)
                    assert torch.equal(expected[:, rank * heads : (rank + 1) * heads], found)
        finally:
            torch.set_num_threads(before)


class TestOtherwise:
    def test_bits_follow_the_chunk_where_nobody_asks(self):
        """
        Without the demand PyTorch's sums of a query differ between chunks: the test above can fail.
        """
        of = shape(9, 3, 64, 7)
        expected = attended_at_once(cpu.plan, of, None)
        assert not torch.equal(expected, attended_in_chunks(cpu.plan, of, None, CUTS["one by one"]))
