"""Paged attention in C++: its values, their bits, and what it may and may not read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.paged_attention import (
    AttentionShape,
    PagedSequences,
    cpu,
    cpu_extension,
    paged_attention,
)
from tests.kernels.test_paged_attention import shape

SCALE = 0.1
NAN = float("nan")
ROWS = [
    (1, 1),
    (1, 64),
    (1, 65),
    (1, 256),
    (1, 257),
    (1, 700),
    (5, 5),
    (40, 300),
    (3, 520),
    (65, 65),
]
"""Query and sequence lengths: around tiles of 64 keys, splits of 256 and items of 32 queries."""

SHAPES = {
    "mha-D64-b16": shape(2, 2, 64, 16),
    "gqa3-D64-b16": shape(9, 3, 64, 16),
    "gqa4-D80-b7": shape(4, 1, 80, 7),
    "gqa3-D96-b1": shape(6, 2, 96, 1),
    "gqa8-D128-b256": shape(8, 1, 128, 256),
    "gqa2-D256-b64": shape(4, 2, 256, 64),
    "gqa5-D20-b3": shape(5, 1, 20, 3),
    "mqa40-D16-b32": shape(40, 1, 16, 32),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=["as-shipped", "all-in-cpp"])
def rows_in_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "all-in-cpp":
        monkeypatch.setattr(cpu_extension, "_LONGEST_QUERY", 10**9)
    return str(request.param)


class Scene:
    """Sequences in shuffled blocks, their queries, and a cache that is NaN wherever none lies."""

    def __init__(self, rows: list[tuple[int, int]], of: AttentionShape, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        held = [-(-seq_len // of.block_size) for _, seq_len in rows]
        free = list(numbers.permutation(sum(held) + 5) + 1)
        self.of = of
        table = np.full((len(rows), max(held) + 1), 10**6, np.int32)  # nobody may follow these
        generator = torch.Generator().manual_seed(seed)
        heads = (2, of.num_kv_heads, of.head_dim)
        cache = torch.full((len(free) + 1, of.block_size, *heads), NAN)
        self.keys_and_values = []
        for row, (_, seq_len) in enumerate(rows):
            table[row, : held[row]] = [free.pop() for _ in range(held[row])]
            own = torch.randn((seq_len, *heads), generator=generator).to(of.dtype)
            self.keys_and_values.append(own)
            at = np.arange(seq_len)
            blocks = torch.from_numpy(table[row][at // of.block_size].astype(np.int64))
            cache[blocks, torch.from_numpy(at % of.block_size)] = own.float()
        self.cache = cache.to(of.dtype)
        num_queries = sum(query_len for query_len, _ in rows)
        query = torch.randn((num_queries, of.num_heads, of.head_dim), generator=generator)
        self.query = query.to(of.dtype)
        self.sequences = PagedSequences(
            query_len=np.array([query_len for query_len, _ in rows], np.int32),
            seq_len=np.array([seq_len for _, seq_len in rows], np.int32),
            block_table=table,
        )

    def attend(self, window: int | None = None) -> torch.Tensor:
        """In C++, as far as the plan does."""
        plan = cpu_extension.plan(self.sequences, self.of, window)
        return paged_attention(self.query, self.cache, plan, SCALE)

    def attend_in_pytorch(self, window: int | None) -> torch.Tensor:
        return cpu.plan(self.known_table(), self.of, window).attend(self.query, self.cache, SCALE)

    def known_table(self) -> PagedSequences:
        """PyTorch's path looks at entries that mean nothing."""
        table = np.minimum(self.sequences.block_table, len(self.cache) - 1)
        return replace(self.sequences, block_table=table)

    def exact(self, window: int | None) -> torch.Tensor:
        """Softmax of scaled scores times values, in float64."""
        rows, first = [], 0
        for query_len, own in zip(self.sequences.query_len, self.keys_and_values, strict=True):
            query = self.query[first : first + query_len].double()
            first += query_len
            wide = own.double().repeat_interleave(self.of.group_size, dim=2)
            scores = torch.einsum("qhd,khd->hqk", query, wide[:, 0]) * SCALE
            key_at = torch.arange(len(own))
            query_at = key_at[len(own) - query_len :, None]
            seen = (key_at <= query_at) & (key_at > query_at - (window or len(own)))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, wide[:, 1]))
        return torch.cat(rows)


class TestValues:
    @pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
    @pytest.mark.parametrize("of", SHAPES.values(), ids=SHAPES)
    def test_error_is_at_most_twice_that_of_pytorch(
        self, of: AttentionShape, dtype: torch.dtype, rows_in_cpp: str
    ):
        """
        Against float64 on the same numbers, C++ errs at most twice as much as PyTorch's path, with and without a window.
        """
        scene = Scene(ROWS, replace(of, dtype=dtype))
        for window in (None, 100):
            expected = scene.exact(window)
            plain_error = (scene.attend_in_pytorch(window) - expected).abs().max()
            error = (scene.attend(window) - expected).abs().max()
            assert error <= 2 * plain_error
