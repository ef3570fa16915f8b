"""
Attention of decodes with lengths that are read when it runs, and drawing from device columns.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.paged_attention import (
    AttentionShape,
    PagedSequences,
    paged_attention,
    plan_resident_decodes,
    reference,
)
from kernels.sampling import Needs, SamplingColumns, draw, sample

BLOCK_SIZE = 4
NUM_BLOCKS = 30
SHAPE = AttentionShape(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    block_size=BLOCK_SIZE,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
ROUNDING = 1e-6
"""Sums of a few dozen float32 products below 10, in another order."""


def scene(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Queries, a cache with NaN wherever no row looks, and shuffled tables of 6 blocks a row."""
    draw_from = torch.Generator().manual_seed(len(lengths))
    query = torch.randn((len(lengths), 4, 8), generator=draw_from)
    cache = torch.full((NUM_BLOCKS + 1, BLOCK_SIZE, 2, 2, 8), float("nan"))
    ids = np.random.default_rng(1).permutation(NUM_BLOCKS)[: 6 * len(lengths)] + 1
    table = ids.reshape(-1, 6).astype(np.int32)
    for row, length in enumerate(lengths):
        for position in range(length):
            block = table[row, position // BLOCK_SIZE]
            values = torch.randn((2, 2, 8), generator=draw_from)
            cache[int(block), position % BLOCK_SIZE] = values
    return query, cache, torch.from_numpy(table), table


class TestAttention:
    @pytest.mark.parametrize("window", [None, 1, 5, 100])
    def test_rows_attend_as_defined(self, window):
        """
        Each row sees its own positions, of which the window leaves the last; what lies beyond may be NaN.
        """
        lengths = [1, 4, 24, 11]
        query, cache, block_table, table = scene(lengths)
        seq_len = np.array(lengths, np.int32)
        sequences = PagedSequences(
            query_len=np.ones(4, np.int32), seq_len=seq_len, block_table=table
        )
        expected = reference.plan(sequences, SHAPE, window).attend(query, cache, 0.4)
        plan = plan_resident_decodes(block_table, torch.from_numpy(seq_len), SHAPE, window=window)
        found = paged_attention(query, cache, plan, 0.4)
        assert (expected - found).abs().max() <= ROUNDING

    def test_plan_serves_what_its_buffers_hold_when_it_runs(self):
        """
        Lengths that change after planning count, and a row of length 0 gets zeros.
        """
        query, cache, block_table, _ = scene([9, 9, 9])
        seq_len = torch.tensor([9, 9, 9], dtype=torch.int32)
        plan = plan_resident_decodes(block_table, seq_len, SHAPE)
        whole = paged_attention(query, cache, plan, 0.4)
        seq_len.copy_(torch.tensor([9, 0, 3]))
        found = paged_attention(query, cache, plan, 0.4)
        assert torch.equal(whole[0], found[0])
        assert torch.equal(torch.zeros(4, 8), found[1])
        assert not torch.equal(whole[2], found[2])
        assert found.isfinite().all()

    @pytest.mark.parametrize(
        ("table", "lengths", "window", "message"),
        [
            (torch.zeros((2, 3)), torch.ones(2).int(), None, "block_table must be int32"),
            (torch.zeros((3, 2)).int().T, torch.ones(2).int(), None, "contiguous"),
            (torch.zeros((2, 3)).int(), torch.ones(3).int(), None, r"seq_len .* shape \[2\]"),
            (torch.zeros((2, 3)).int(), torch.ones(2), None, "seq_len must be int32"),
            (torch.zeros((2, 3)).int(), torch.ones(2).int(), 0, "window must be at least 1"),
        ],
    )
    def test_what_does_not_fit_is_named(self, table, lengths, window, message):
        """
        Tables and lengths of another type, shape or layout are refused, and windows of nothing.
        """
        with pytest.raises(ValueError, match=message):
            plan_resident_decodes(table, lengths, SHAPE, window=window)


class TestDraw:
    def columns(self) -> SamplingColumns:
        """A greedy row, a noisy one, and one of each filter."""
        return SamplingColumns(
            temperature=torch.tensor([0.0, 1.0, 0.8, 1.2, 1.0]),
            top_k=torch.tensor([0, 0, 5, 0, 0], dtype=torch.int32),
            top_p=torch.tensor([1.0, 1.0, 1.0, 0.7, 1.0]),
            seed=torch.arange(5),
            position=torch.arange(5) + 9,
            choice=torch.zeros(5, dtype=torch.int64),
            min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1]),
        )

    def test_tokens_are_those_of_sample(self):
        """
        Columns that lie with the logits draw the same tokens, with the same validity.
        """
        logits = torch.randn((5, 200), generator=torch.Generator().manual_seed(2)) * 3
        logits[3, 7] = float("nan")
        expected = sample(logits, self.columns())
        token, valid = draw(logits, self.columns(), Needs())
        assert expected.token.tolist() == token.tolist()
        assert expected.valid.tolist() == valid.tolist() == [True, True, True, False, True]

    def test_rows_that_are_not_adjacent_are_refused(self):
        """
        Logits must lie row by row.
        """
        with pytest.raises(ValueError, match="rows of logits must be adjacent"):
            draw(torch.zeros((200, 5)).T, self.columns(), Needs())
