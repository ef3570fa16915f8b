"""Attention on the CPU over runs of adjacent blocks, without gathering them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.paged_attention import AttentionShape, PagedSequences, cpu, cpu_runs, reference
from kernels.paged_attention.cpu_runs import InPlaceTile, merge
from tests.kernels.test_paged_attention import TOLERANCE, shape


@pytest.fixture(autouse=True)
def every_length_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiles of any size be read in place where they can."""
    monkeypatch.setattr(cpu_runs, "LEAST_BYTES_OF_ONE", 1)
    monkeypatch.setattr(cpu_runs, "LEAST_BYTES_OF_SEVERAL", 1)


def scene(
    rows: list[tuple[int, int, int]], of: AttentionShape
) -> tuple[PagedSequences, torch.Tensor, torch.Tensor]:
    """
    Return sequences (query length, length, runs) with their blocks in so many runs that stand in
    reverse order; the cache is NaN where no sequence lies.
    """
    generator = torch.Generator().manual_seed(0)
    size, first = of.block_size, 1
    tables = []
    for _, seq_len, num_runs in rows:
        parts = np.array_split(np.arange(-(-seq_len // size)), num_runs)
        table = []
        for part in reversed(parts):
            table.insert(0, np.arange(first, first + len(part)))
            first += len(part) + 1
        tables.append(np.concatenate(table))
    block_table = np.zeros((len(rows), max(map(len, tables))), np.int32)
    cache = torch.full((first, size, 2, of.num_kv_heads, of.head_dim), float("nan"), dtype=of.dtype)
    for row, table in enumerate(tables):
        block_table[row, : len(table)] = table
        own = torch.randn((len(table) * size, *cache.shape[2:]), generator=generator)
        own[rows[row][1] :] = float("nan")
        cache[torch.from_numpy(table)] = own.view(-1, *cache.shape[1:]).to(of.dtype)
    sequences = PagedSequences(
        query_len=np.array([query_len for query_len, _, _ in rows], np.int32),
        seq_len=np.array([seq_len for _, seq_len, _ in rows], np.int32),
        block_table=block_table,
    )
    num_queries = int(sequences.query_len.sum())
    query = torch.randn((num_queries, of.num_heads, of.head_dim), generator=generator)
    return sequences, query.to(of.dtype), cache


def runs_in_place(plan: object) -> list[int]:
    """Return the number of runs of each tile that is read in place."""
    assert isinstance(plan, cpu.TiledPlan)
    return [len(group.runs) for group in plan.groups if isinstance(group, InPlaceTile)]


class TestRuns:
    @pytest.mark.parametrize("num_runs", [1, 2, 4])
    @pytest.mark.parametrize(
        "of",
        [shape(), shape(block_size=1), shape(block_size=7), shape(6, 1, 4, 32)],
        ids=["gqa-b16", "gqa-b1", "gqa-b7", "mqa-b32"],
    )
    def test_decodes_match_the_definition(self, num_runs: int, of: AttentionShape):
        """
        Sequences of one to four runs are read in place and give the definition's values, with NaN around them.
        """
        sequences, query, cache = scene([(1, 200, num_runs), (1, 131, num_runs)], of)
        plan = cpu.plan(sequences, of, None)
        assert [num_runs] * 2 == runs_in_place(plan)
        expected = reference.plan(sequences, of, None).attend(query, cache, 0.4)
        assert (expected - plan.attend(query, cache, 0.4)).abs().max() <= TOLERANCE[of.dtype]

    @pytest.mark.parametrize("window", [None, 20, 50])
    def test_chunks_and_windows_match_the_definition(self, window: int | None):
        """
        Chunks of one run are read in place, masked as ever, beside rows that are gathered, in any order.
        """
        rows = [(1, 90, 1), (70, 150, 1), (1, 40, 9), (5, 80, 3), (33, 33, 1), (1, 64, 2)]
        sequences, query, cache = scene(rows, shape(block_size=4))
        plan = cpu.plan(sequences, shape(block_size=4), window)
        assert {1} <= {*runs_in_place(plan)}
        assert len(runs_in_place(plan)) < len(plan.groups)
        expected = reference.plan(sequences, shape(block_size=4), window)
        wanted = expected.attend(query, cache, 0.4)
        assert (wanted - plan.attend(query, cache, 0.4)).abs().max() <= TOLERANCE[torch.float32]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_sixteen_bit_types_match(self, dtype: torch.dtype):
        """
        Merged runs are within two roundings of the definition on the same numbers.
        """
        of = shape(dtype=dtype)
        sequences, query, cache = scene([(1, 200, 4), (1, 99, 1)], of)
        expected = reference.plan(sequences, of, None).attend(query, cache, 0.4).float()
        found = cpu.plan(sequences, of, None).attend(query, cache, 0.4)
        assert dtype == found.dtype
        assert (expected - found.float()).abs().max() <= TOLERANCE[dtype]

    def test_many_runs_are_gathered(self):
        """
        A sequence of five runs is gathered.
        """
        of = shape()
        sequences, _, _ = scene([(1, 200, 5)], of)
        assert [] == runs_in_place(cpu.plan(sequences, of, None))

    def test_short_sequences_are_gathered(self, monkeypatch: pytest.MonkeyPatch):
        """
        One run is read in place from a size on, several from a larger one.
        """
        of = shape()
        sequences, _, _ = scene([(1, 64, 1), (1, 128, 1), (1, 128, 2), (1, 256, 2)], of)
        bytes_per_key = 2 * of.num_kv_heads * of.head_dim * 4
        monkeypatch.setattr(cpu_runs, "LEAST_BYTES_OF_ONE", 128 * bytes_per_key)
        monkeypatch.setattr(cpu_runs, "LEAST_BYTES_OF_SEVERAL", 256 * bytes_per_key)
        assert [1, 2] == runs_in_place(cpu.plan(sequences, of, None))

    def test_blocks_that_the_cache_lacks_are_an_error(self):
        """
        A run that reaches past the cache's end is refused instead of being read in part.
        """
        of = shape()
        sequences, query, cache = scene([(1, 64, 1)], of)
        plan = cpu.plan(sequences, of, None)
        with pytest.raises(RuntimeError, match="exceeds"):
            plan.attend(query, cache[:3], 0.4)


class TestMerging:
    def test_parts_put_together_are_the_whole(self):
        """
        Attention over parts of the keys, weighted by log-sum-exp, is attention over all, however much
        larger the scores of one part are.
        """
        generator = torch.Generator().manual_seed(1)
        scores = torch.randn((3, 40), generator=generator, dtype=torch.float64)
        scores[:, 30:] += 200.0
        values = torch.randn((40, 8), generator=generator, dtype=torch.float64)
        parts = [slice(0, 7), slice(7, 30), slice(30, 40)]
        outs = torch.stack([scores[:, part].softmax(-1) @ values[part] for part in parts])
        log_sums = torch.stack([scores[:, part].logsumexp(-1) for part in parts])
        # Sums of 40 float64 products of up to 4, a rounding of 1e-16 each, and much room.
        assert torch.allclose(scores.softmax(-1) @ values, merge(outs, log_sums), atol=1e-12)
