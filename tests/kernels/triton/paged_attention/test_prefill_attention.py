"""Prefill attention in Triton against the definition."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import triton

from kernels.paged_attention import AttentionShape, PagedSequences, reference
from kernels.paged_attention.triton_prefill import prefill_attention
from kernels.paged_attention.triton_prefill_tiles import cut_prefill, tile_size
from tests.kernels.attention_error import Attended, assert_errs_little, attended
from tests.kernels.test_paged_attention import scene, shape
from tests.kernels.triton.compiled import ROOT

HALF = torch.float16
DTYPES_16_BIT = [HALF]
if not triton.knobs.runtime.interpret:  # the interpreter multiplies the bit patterns of bfloat16
    DTYPES_16_BIT.append(torch.bfloat16)
HEAD_DIMS = (64, 80, 96, 128, 256)
SCALE = 0.4
TOLERANCE = {torch.float32: 4e-6, HALF: 3e-3}
"""
Tolerance for two roundings of outputs near 1; in float32 those of scores near 16 in powers of two.
"""

CHUNKS = [(5, 5), (2, 61), (33, 40)]
SHAPES = {
    "gqa4-d64-b16": shape(8, 2, 64, 16, HALF),
    "gqa3-d80-b7": shape(6, 2, 80, 7, HALF),
    "mqa5-d96-b1": shape(5, 1, 96, 1, HALF),
    "mha-d128-b64": shape(2, 2, 128, 64, HALF),
    "gqa2-d256-b48": shape(4, 2, 256, 48, HALF),
    "gqa2-d16-b32-fp32": shape(2, 1, 16, 32),
}


def attend(
    sequences: PagedSequences,
    query: torch.Tensor,
    cache: torch.Tensor,
    of: AttentionShape,
    window: int | None,
    device: torch.device,
    scale: float = SCALE,
) -> torch.Tensor:
    """
    Attend all rows of a batch by the prefill kernel and return them on the CPU; NaN where not
    written.
    """
    out = torch.full(query.shape, float("nan"), dtype=of.dtype, device=device)
    for size, tiles in cut_prefill(sequences, of, np.arange(len(sequences.query_len))):
        prefill_attention(
            query.to(device),
            cache.to(device),
            torch.from_numpy(sequences.block_table).to(device),
            torch.from_numpy(tiles).to(device),
            size,
            scale=scale,
            window=window,
            out=out,
        )
    return out.cpu()


def select(sequences: PagedSequences, row: int) -> tuple[PagedSequences, slice]:
    """Return one row of a batch as a batch of its own, and the place of its queries."""
    first = int(sequences.query_len[:row].sum())
    alone = PagedSequences(
        query_len=sequences.query_len[row : row + 1],
        seq_len=sequences.seq_len[row : row + 1],
        block_table=sequences.block_table[row : row + 1],
    )
    return alone, slice(first, first + int(sequences.query_len[row]))


class TestPrefill:
    @pytest.mark.parametrize("window", [None, 24], ids=["full", "w24"])
    @pytest.mark.parametrize("of", SHAPES.values(), ids=SHAPES)
    def test_matches_the_definition(self, of: AttentionShape, window: int | None, device):
        """
        Prompts and chunks of any heads and block size get the definition's values, with NaN everywhere else in the cache.
        """
        sequences, query, cache = scene(CHUNKS, of)
        expected = reference.plan(sequences, of, window).attend(query, cache, SCALE)
        found = attend(sequences, query, cache, of, window, device)
        assert (expected - found).abs().max() <= TOLERANCE[of.dtype]

    @pytest.mark.slow
    @pytest.mark.parametrize("window", [1, 5, 64, 150])
    @pytest.mark.parametrize("block_size", [1, 7, 16, 64, 100, 256])
    def test_windows_and_block_sizes_match(self, window: int, block_size: int, device):
        """
        A window that ends in, before or between tiles hides the same keys for every block size.
        """
        of = shape(6, 2, 64, block_size, HALF)
        sequences, query, cache = scene([(70, 70), (3, 131), (90, 200)], of)
        expected = reference.plan(sequences, of, window).attend(query, cache, SCALE)
        found = attend(sequences, query, cache, of, window, device)
        assert (expected - found).abs().max() <= TOLERANCE[HALF]

    @pytest.mark.slow
    @pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8, 12, 16, 32])
    def test_groups_of_any_size_match(self, group_size: int, device):
        """
        Each query gets its own values, however many heads share a key head.
        """
        of = shape(2 * group_size, 2, 64, 16, HALF)
        sequences, query, cache = scene([(9, 9), (41, 100), (2, 30)], of)
        expected = reference.plan(sequences, of, None).attend(query, cache, SCALE)
        found = attend(sequences, query, cache, of, None, device)
        assert (expected - found).abs().max() <= TOLERANCE[HALF]

    @pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
    @pytest.mark.parametrize(
        ("head_dim", "window"),
        [(64, None), *(pytest.param(dim, 40, marks=pytest.mark.slow) for dim in HEAD_DIMS)],
    )
    def test_error_is_what_the_arithmetic_allows(
        self, head_dim: int, window: int | None, dtype: torch.dtype, device
    ):
        """
        On the same rounded numbers 16 bits err by float32's roundings, one of each weight and one of the result.
        """
        of = shape(8, 2, head_dim, 16, dtype)
        scale = head_dim**-0.5
        sequences, query, cache = scene([(30, 90), (70, 70)], of)
        parts = []
        for row, queries in enumerate(query.split(sequences.query_len.tolist())):
            key_at = torch.arange(int(sequences.seq_len[row]))
            query_at = key_at[-len(queries) :, None]
            seen = (key_at <= query_at) & (key_at > query_at - (window or len(key_at)))
            blocks = torch.from_numpy(sequences.block_table[row])[key_at // 16].long()
            key, value = cache[blocks, key_at % 16].unbind(1)
            parts.append(attended(queries, key, value, seen, scale=scale, weight_dtype=dtype))
        found = attend(sequences, query, cache, of, window, device, scale)
        assert_errs_little(Attended.joined(parts), found)

    @pytest.mark.usefixtures("rows_alone_in_products")
    def test_row_has_the_same_bits_alone(self, device):
        """
        A row's output does not depend on the rows around it, to the last bit.
        """
        of = shape(4, 2, 32, 16, HALF)
        sequences, query, cache = scene([(3, 50), (40, 60), (17, 17)], of)
        together = attend(sequences, query, cache, of, 48, device)
        for row in range(3):
            alone, own = select(sequences, row)
            assert torch.equal(attend(alone, query[own], cache, of, 48, device), together[own])

    def test_strided_queries_are_read_where_they_lie(self, device):
        """
        Queries may be a slice of a wider tensor.
        """
        of = shape(4, 2, 32, 16, HALF)
        sequences, query, cache = scene([(3, 20)], of)
        wide = torch.cat((query, torch.full_like(query, float("nan"))), dim=1)
        expected = attend(sequences, query, cache, of, None, device)
        assert torch.equal(expected, attend(sequences, wide[:, :4], cache, of, None, device))


class TestCache:
    def test_positions_before_the_window_are_never_read(self, device):
        """
        Positions before every query's window may hold anything, NaN too.
        """
        of = shape(4, 2, 32, 16, HALF)
        sequences, query, cache = scene([(3, 75)], of)
        expected = attend(sequences, query, cache, of, 9, device)
        for position in range(75 - 3 - 8):
            cache[int(sequences.block_table[0, position // 16]), position % 16] = float("nan")
        assert torch.equal(expected, attend(sequences, query, cache, of, 9, device))

    @pytest.mark.slow
    def test_cache_may_have_more_elements_than_31_bits_count(self):
        """
        Blocks behind the first 2**31 elements of the cache are found, and so are queries and outputs behind them.
        """
        script = "from tests.kernels.triton.paged_attention.test_prefill_attention import attend_far; attend_far()"
        done = subprocess.run(  # a process of its own: wrong addresses end it
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (0, "") == (done.returncode, done.stderr)


class TestPadding:
    def test_tiles_without_queries_write_nothing(self, device):
        """
        A tile of no queries leaves the output alone.
        """
        assert padded(0, 0, device).isnan().all()

    def test_tiles_before_position_zero_write_zeros(self, device):
        """
        Queries at negative positions see no key: their output is zero, not NaN.
        """
        found = padded(-3, 3, device)
        assert not found[:3].any()
        assert found[3:].isnan().all()


def padded(position: int, num_queries: int, device: torch.device) -> torch.Tensor:
    """Return the output, NaN before, of one tile with a meaningless row of the block table."""
    of = shape(4, 2, 32, 16, HALF)
    out = torch.full((5, 4, 32), float("nan"), dtype=HALF, device=device)
    prefill_attention(
        torch.ones_like(out),
        torch.full((2, 16, 2, 2, 32), float("nan"), dtype=HALF, device=device),
        torch.zeros((1, 2), dtype=torch.int32, device=device),
        torch.tensor([[0, 0, position, num_queries]], dtype=torch.int32, device=device),
        tile_size(of, is_short=True),
        scale=SCALE,
        window=9,
        out=out,
    )
    return out.cpu()


def attend_far() -> None:
    """
    Compare the last blocks of a cache of 2.6e9 elements with the same numbers in a small one; pages
    that are never written take no memory on the CPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    of = shape(2, 1, 64, 128, HALF)
    sequences, query, cache = scene([(20, 150)], of)
    expected = attend(sequences, query, cache, of, None, device)
    num_blocks = 160_000
    far = torch.empty((num_blocks, 128, 2, 1, 64), dtype=HALF, device=device)
    assert far.numel() > 2**31
    offset = num_blocks - len(cache)
    far[offset:] = cache.to(device)
    sequences.block_table[:] += offset
    found = attend(sequences, query, far, of, None, device)
    assert torch.equal(expected, found)
