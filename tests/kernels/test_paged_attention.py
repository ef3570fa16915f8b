"""Paged attention: every implementation against the definition, and the definition against a formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import (
    AttentionShape,
    PagedSequences,
    cpu,
    paged_attention,
    plan_paged_attention,
    reference,
    tiles,
    use_cpu_extension,
)

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""
Tolerance of weighted means of values up to about 4: a few roundings of float32 on the way, and one
of the result's own type.
"""

MIXES = {
    "decodes": [(1, 1), (1, 17), (1, 300), (1, 64)],
    "prompts": [(5, 5), (64, 64), (65, 65), (200, 200)],
    "chunks": [(3, 40), (70, 150), (64, 65)],
    "mixed": [(1, 33), (1, 2), (20, 20), (1, 129), (90, 100), (21, 48)],
    "many-short": [(length, length) for length in range(1, 24)],
}


def shape(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=CPU,
    )


def scene(
    lengths: list[tuple[int, int]], of: AttentionShape, seed: int = 0
) -> tuple[PagedSequences, torch.Tensor, torch.Tensor]:
    """Sequences in random blocks, queries, and a cache that is NaN wherever no sequence lies."""
    numbers = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    held = [-(-seq_len // of.block_size) for _, seq_len in lengths]
    free = numbers.permutation(sum(held) + 5) + 1
    table = numbers.integers(0, len(free), (len(lengths), max(held) + 1), dtype=np.int32)
    kv_shape = (len(free) + 1, of.block_size, 2, of.num_kv_heads, of.head_dim)
    cache = torch.full(kv_shape, float("nan"), dtype=of.dtype)
    flat = cache.view(-1, *kv_shape[2:])
    for row, (_, seq_len) in enumerate(lengths):
        table[row, : held[row]], free = free[: held[row]], free[held[row] :]
        for position in range(seq_len):
            place = int(table[row, position // of.block_size]) * of.block_size
            values = torch.randn(kv_shape[2:], generator=generator)
            flat[place + position % of.block_size] = values.to(of.dtype)
    sequences = PagedSequences(
        query_len=np.array([query for query, _ in lengths], np.int32),
        seq_len=np.array([total for _, total in lengths], np.int32),
        block_table=table,
    )
    num_queries = sum(query for query, _ in lengths)
    query = torch.randn((num_queries, of.num_heads, of.head_dim), generator=generator)
    return sequences, query.to(of.dtype), cache


class TestDefinition:
    def test_one_query_is_a_weighted_mean(self):
        """
        A decode's output is the softmax-weighted mean of the values of its own sequence.
        """
        of = shape(num_heads=2, num_kv_heads=1, block_size=4)
        sequences, query, cache = scene([(1, 6)], of)
        found = reference.plan(sequences, of, None).attend(query, cache, 0.5)
        table = sequences.block_table[0]
        keys = [cache[int(table[at // 4]), at % 4, 0, 0] for at in range(6)]
        values = [cache[int(table[at // 4]), at % 4, 1, 0] for at in range(6)]
        for head in range(2):
            weights = [math.exp(0.5 * float(query[0, head] @ key)) for key in keys]
            mean = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
            # Six values only.
            assert torch.allclose(mean, found[0, head], atol=TOLERANCE[torch.float32] / 2)

    def test_window_hides_older_positions(self):
        """
        With a window of w a query sees its own and the w - 1 positions before it, and no other.
        """
        of = shape(block_size=4)
        sequences, query, cache = scene([(3, 9)], of)
        before = reference.plan(sequences, of, 4).attend(query, cache, 0.3)
        oldest = int(sequences.block_table[0, 0])
        cache[oldest, :3] = 100.0  # positions 0 to 2; the first query, at 6, sees 3 to 6
        assert torch.equal(before, reference.plan(sequences, of, 4).attend(query, cache, 0.3))
        cache[oldest, 3] = 100.0
        changed = reference.plan(sequences, of, 4).attend(query, cache, 0.3)
        assert not torch.equal(before[0], changed[0])
        assert torch.equal(before[1:], changed[1:])


class TestCpu:
    @pytest.fixture(autouse=True)
    def in_pytorch(self) -> None:
        """Compute in PyTorch: engines made before may have left C++ on."""
        use_cpu_extension("off")

    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("window", [None, 1, 24])
    @pytest.mark.parametrize(
        "of",
        [shape(), shape(block_size=1), shape(block_size=7), shape(4, 4, 16), shape(6, 1, 4, 32)],
        ids=["gqa-b16", "gqa-b1", "gqa-b7", "mha-b16", "mqa-b32"],
    )
    def test_matches_the_definition(self, mix: str, window: int | None, of: AttentionShape):
        """
        Any mix of prompts, chunks and decodes gives the definition's values, with NaN everywhere else in the cache.
        """
        sequences, query, cache = scene(MIXES[mix], of)
        expected = reference.plan(sequences, of, window).attend(query, cache, 0.4)
        plan = plan_paged_attention(sequences, of, window=window)
        assert isinstance(plan, cpu.TiledPlan)
        found = paged_attention(query, cache, plan, 0.4)
        assert (expected - found).abs().max() <= TOLERANCE[of.dtype]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_sixteen_bit_types_match(self, dtype: torch.dtype):
        """
        In 16-bit types the result is within two roundings of the definition on the same numbers.
        """
        of = shape(dtype=dtype)
        sequences, query, cache = scene(MIXES["mixed"], of)
        expected = reference.plan(sequences, of, None).attend(query, cache, 0.4).float()
        found = cpu.plan(sequences, of, None).attend(query, cache, 0.4).float()
        assert (expected - found).abs().max() <= TOLERANCE[dtype]

    def test_strided_queries_are_accepted(self):
        """
        Queries may be a slice of a wider tensor, as they come out of a fused projection.
        """
        of = shape()
        sequences, query, cache = scene(MIXES["mixed"], of)
        wide = torch.cat((query, torch.full_like(query, float("nan"))), dim=1)
        plan = plan_paged_attention(sequences, of)
        expected = paged_attention(query, cache, plan, 0.4)
        assert torch.equal(expected, paged_attention(wide[:, :4], cache, plan, 0.4))

    def test_small_gathers_give_the_same_values(self, monkeypatch: pytest.MonkeyPatch):
        """
        The number of tiles that run together changes no value beyond rounding.
        """
        of = shape()
        sequences, query, cache = scene(MIXES["mixed"], of)
        expected = cpu.plan(sequences, of, None).attend(query, cache, 0.4)
        monkeypatch.setattr(cpu, "_GATHER_BYTES", 1)
        plan = cpu.plan(sequences, of, None)
        assert len(plan.groups) == 7
        atol = TOLERANCE[torch.float32]
        assert torch.allclose(expected, plan.attend(query, cache, 0.4), atol=atol)


class TestTiles:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 200), st.integers(0, 300)), min_size=1, max_size=12),
        st.sampled_from([None, 1, 5, 100]),
        st.sampled_from([1, 7, 16]),
        st.sampled_from([1, 100, 5000]),
    )
    def test_groups_cover_every_query_once_and_stay_small(
        self,
        rows: list[tuple[int, int]],
        window: int | None,
        block_size: int,
        keys_per_group: int,
    ):
        """
        Each query is in exactly one tile; groups hold like tiles and, unless one tile is larger, few keys.
        """
        query_len = np.array([query for query, _ in rows], np.int32)
        seq_len = query_len + np.array([context for _, context in rows], np.int32)
        table = np.zeros((len(rows), 600), np.int32)
        sequences = PagedSequences(query_len=query_len, seq_len=seq_len, block_table=table)
        seen: list[int] = []
        for group in tiles.group_tiles(
            tiles.cut_tiles(sequences, window, block_size), keys_per_group
        ):
            for first, count in zip(group.first_query, group.num_queries, strict=True):
                seen += range(first, first + count)
            padded_keys = len(group) * group.num_keys.max()
            assert len(group) == 1 or padded_keys <= keys_per_group
            assert 2 * group.num_queries.min() >= group.num_queries.max()
            assert 2 * group.num_keys.min() >= group.num_keys.max()
        assert list(range(query_len.sum())) == sorted(seen)


class TestChecks:
    @pytest.mark.parametrize(
        ("query_len", "seq_len", "window", "sentence"),
        [
            ([1], [1, 2], None, "1 query lengths, 2 sequence lengths and 1 block tables"),
            ([0], [1], None, "1 <= query_len <= seq_len"),
            ([3], [2], None, "1 <= query_len <= seq_len"),
            ([1], [65], None, "a sequence of 65 exceeds its table of 64 positions"),
            ([1], [1], 0, "window must be at least 1"),
        ],
    )
    def test_contradicting_lengths_are_refused(
        self, query_len: list[int], seq_len: list[int], window: int | None, sentence: str
    ):
        """
        A plan is refused with the reason.
        """
        sequences = PagedSequences(
            query_len=np.array(query_len, np.int32),
            seq_len=np.array(seq_len, np.int32),
            block_table=np.zeros((1, 4), np.int32),
        )
        with pytest.raises(ValueError, match=sentence):
            plan_paged_attention(sequences, shape(), window=window)

    def test_other_tensors_than_planned_are_refused(self):
        """
        Shapes, strides and types must be the plan's.
        """
        of = shape()
        sequences, query, cache = scene([(2, 20)], of)
        plan = plan_paged_attention(sequences, of)
        with pytest.raises(ValueError, match="query must have shape"):
            paged_attention(query[:1], cache, plan, 1.0)
        with pytest.raises(ValueError, match="last stride 1"):
            paged_attention(query.transpose(1, 2).contiguous().transpose(1, 2), cache, plan, 1.0)
        with pytest.raises(ValueError, match="kv_cache must be contiguous"):
            paged_attention(query, cache[:, :8], plan, 1.0)
        with pytest.raises(ValueError, match=r"planned for torch.float32"):
            paged_attention(query.half(), cache, plan, 1.0)

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
    def test_scale_that_is_not_positive_is_refused(self, scale: float):
        """
        Scores are scaled by a positive number.
        """
        of = shape()
        sequences, query, cache = scene([(2, 20)], of)
        with pytest.raises(ValueError, match="scale must be positive"):
            paged_attention(query, cache, plan_paged_attention(sequences, of), scale)
