"""A step's attention in Triton: the path of each row, and the data that reaches the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from kernels import dispatch
from kernels.paged_attention import (
    AttentionPlan,
    PagedSequences,
    paged_attention,
    reference,
    triton_plan,
)
from kernels.paged_attention.triton_decode import decode_attention
from kernels.paged_attention.triton_plan import DecodeRows, TritonPlan
from tests.kernels.test_paged_attention import scene, shape

HALF = torch.float16
SCALE = 0.4
TOLERANCE = 3e-3
"""Two roundings of outputs near 1."""


def attend(
    sequences: PagedSequences,
    query: torch.Tensor,
    cache: torch.Tensor,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    """Attend all rows and return results on the CPU."""
    num_heads, head_dim = query.shape[1:]
    of = shape(num_heads, cache.shape[3], head_dim, cache.shape[1], query.dtype)
    plan = triton_plan.plan(sequences, replace(of, device=device), window)
    return paged_attention(query.to(device), cache.to(device), plan, SCALE).cpu()


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch):
    """
    Run one program per row and key head: the interpreter takes time for each, and no bit depends on
    it.
    """
    monkeypatch.setattr(triton_plan, "decode_attention", partial(decode_attention, num_splits=1))


class TestMixedBatches:
    @pytest.mark.parametrize(
        ("lengths", "window"),
        [
            ([(1, 1), (1, 17), (1, 40)], None),
            ([(1, 33), (1, 2), (20, 20)], None),
            ([(3, 20), (1, 33), (21, 48), (1, 2)], 24),
        ],
        ids=["decodes", "decodes-first", "any-order-w24"],
    )
    def test_every_row_matches_the_definition(
        self, lengths: list[tuple[int, int]], window: int | None, device
    ):
        """
        Decodes and chunks of a batch, in any order, get the definition's values in their own places.
        """
        of = shape(6, 2, 32, 16, HALF)
        sequences, query, cache = scene(lengths, of)
        expected = reference.plan(sequences, of, window).attend(query, cache, SCALE)
        found = attend(sequences, query, cache, window, device)
        assert (expected - found).abs().max() <= TOLERANCE

    @pytest.mark.usefixtures("rows_alone_in_products")
    def test_row_has_the_same_bits_alone(self, device):
        """
        Decodes and chunks keep their bits, whatever rows are around them and in which order.
        """
        of = shape(4, 2, 32, 16, HALF)
        lengths = [(1, 33), (20, 20), (1, 40), (3, 48), (1, 2)]
        sequences, query, cache = scene(lengths, of)
        together = attend(sequences, query, cache, None, device)
        first = np.cumsum(sequences.query_len) - sequences.query_len
        for row, (query_len, _) in enumerate(lengths):
            alone = PagedSequences(
                query_len=sequences.query_len[row : row + 1],
                seq_len=sequences.seq_len[row : row + 1],
                block_table=sequences.block_table[row : row + 1],
            )
            own = slice(int(first[row]), int(first[row]) + query_len)
            assert torch.equal(attend(alone, query[own], cache, None, device), together[own])


class TestChoice:
    def test_cuda_gets_the_triton_plan(self):
        """
        A CUDA device runs Triton's kernels, whether or not there is such a device now, and the definition only if asked to.
        """
        operation = dispatch._operations["paged_attention"]
        device = torch.device("cuda")
        try:
            operation.forget()
            assert triton_plan.plan is operation.on(device)
            dispatch.configure({"paged_attention": "reference"})
            assert reference.plan is operation.on(device)
        finally:
            dispatch.configure({})


class TestPlan:
    def test_decodes_in_front_are_taken_as_they_stand(self, device):
        """
        Queries of decodes are not copied when decodes come first, as the scheduler orders them.
        """
        of = replace(shape(), device=device)
        decodes_first, _, _ = scene([(1, 3), (1, 5), (4, 4)], of)
        chunk_first, _, _ = scene([(4, 4), (1, 3)], of)
        front = triton_plan.plan(decodes_first, of, None).decodes
        behind = triton_plan.plan(chunk_first, of, None).decodes
        assert front is not None
        assert front.query_at is None
        assert [3, 5] == front.seq_len.tolist()
        assert behind is not None
        assert behind.query_at is not None
        assert [4] == behind.query_at.tolist()

    def test_all_columns_reach_the_device_by_one_copy(self, device):
        """
        Tables and lengths are parts of one tensor, each aligned to 16 bytes.
        """
        of = replace(shape(block_size=4), device=device)
        sequences, _, _ = scene([(1, 9), (1, 2), (70, 70), (3, 5)], of)
        plan = triton_plan.plan(sequences, of, None)
        assert plan.decodes is not None
        parts = [plan.block_table, plan.decodes.seq_len, *(tiles for _, tiles in plan.prefills)]
        assert 4 == len(parts)
        assert 1 == len({part.untyped_storage().data_ptr() for part in parts})
        assert {0} == {part.data_ptr() % 16 for part in parts}

    def test_buffers_are_read_when_it_runs(self, device):
        """
        One plan over buffers that stay where they are serves new lengths and tables, and rows of padding get zeros.
        """
        of = replace(shape(4, 2, 32, 16, HALF), device=device)
        rows = torch.zeros((3, 20), dtype=torch.int32, device=device)
        lengths = torch.zeros(3, dtype=torch.int32, device=device)
        plan: AttentionPlan = TritonPlan(
            shape=of,
            num_queries=3,
            window=None,
            block_table=rows,
            decodes=DecodeRows(lengths, None),
            prefills=(),
        )
        for batch in ([(1, 40), (1, 90)], [(1, 7), (1, 16), (1, 33)]):
            sequences, query, cache = scene(batch, of)
            expected = reference.plan(sequences, of, None).attend(query, cache, SCALE)
            num_rows, width = sequences.block_table.shape
            rows.zero_()[:num_rows, :width] = torch.from_numpy(sequences.block_table)
            lengths.zero_()[:num_rows] = torch.from_numpy(sequences.seq_len)
            padded = torch.ones((3, 4, 32), dtype=HALF)
            padded[:num_rows] = query
            found = paged_attention(padded.to(device), cache.to(device), plan, SCALE).cpu()
            assert (expected - found[:num_rows]).abs().max() <= TOLERANCE
            assert not found[num_rows:].any()

    def test_heads_no_kernel_takes_are_refused(self, device):
        """
        Heads wider than the kernels take are an error when the step is planned.
        """
        of = replace(shape(head_dim=260), device=device)
        sequences, _, _ = scene([(1, 5)], of)
        with pytest.raises(ValueError, match="heads of up to 256"):
            triton_plan.plan(sequences, of, None)
