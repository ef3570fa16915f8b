"""Paged attention in C++: its values, their bits, and what it may and may not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import cpu_features
from kernels.paged_attention import (
    AttentionShape,
    PagedSequences,
    cpu_extension,
    paged_attention,
    reference,
)
from tests.kernels.attention_error import Attended, assert_errs_little, attended
from tests.kernels.other_processors import OTHER_PROCESSORS, library_for
from tests.kernels.test_paged_attention import shape

pytestmark = pytest.mark.compiler

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
    "gqa2-D64-b5": shape(10, 5, 64, 5),  # more heads than one item of a lone query takes
    "gqa4-D80-b7": shape(4, 1, 80, 7),
    "mha-D80-b1": shape(2, 2, 80, 1),
    "gqa3-D96-b1": shape(6, 2, 96, 1),
    "gqa8-D128-b256": shape(8, 1, 128, 256),
    "gqa2-D256-b64": shape(4, 2, 256, 64),
    "gqa5-D20-b3": shape(5, 1, 20, 3),
    "mqa40-D16-b32": shape(40, 1, 16, 32),
}
CHUNKED = {name: SHAPES[name] for name in ("gqa3-D64-b16", "mha-D80-b1", "mqa40-D16-b32")}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=[8, 10**9], ids=["short-in-cpp", "all-in-cpp"])
def longest_in_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """
    Set the query lengths up to which rows run in C++; as shipped they depend on the processor.
    """
    monkeypatch.setattr(cpu_extension, "_longest_query", lambda _dtype: request.param)
    return int(request.param)


@pytest.fixture
def all_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_extension, "_longest_query", lambda _dtype: 10**9)


class Scene:
    """Sequences in shuffled blocks, their queries, and a cache that is NaN wherever none lies."""

    def __init__(self, rows: list[tuple[int, int]], of: AttentionShape, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        held = [-(-seq_len // of.block_size) for _, seq_len in rows]
        free = list(numbers.permutation(sum(held) + 5) + 1)
        self.of = of
        table = np.full((len(rows), max(held) + 1), 10**6, np.int32)  # must not be followed
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
        """Attend in C++, as far as the plan does."""
        plan = cpu_extension.plan(self.sequences, self.of, window)
        return paged_attention(self.query, self.cache, plan, SCALE)

    def known_table(self) -> PagedSequences:
        """Replace entries that mean nothing, because PyTorch's path looks at them."""
        table = np.minimum(self.sequences.block_table, len(self.cache) - 1)
        return replace(self.sequences, block_table=table)

    def attended(self, window: int | None, weight_dtype: torch.dtype) -> Attended:
        """The definition, and what the arithmetic allows that rounds weights to a type."""
        rows, first = [], 0
        for query_len, own in zip(self.sequences.query_len, self.keys_and_values, strict=True):
            query = self.query[first : first + query_len]
            first += query_len
            key_at = torch.arange(len(own))
            query_at = key_at[len(own) - query_len :, None]
            seen = (key_at <= query_at) & (key_at > query_at - (window or len(own)))
            key, value = own.unbind(1)
            rows.append(attended(query, key, value, seen, scale=SCALE, weight_dtype=weight_dtype))
        return Attended.joined(rows)


def some_rows(sequences: PagedSequences, rows: list[int]) -> PagedSequences:
    return PagedSequences(
        query_len=sequences.query_len[rows],
        seq_len=sequences.seq_len[rows],
        block_table=sequences.block_table[rows],
    )


def assert_scene_errs_little(scene: Scene, weight_dtype: torch.dtype = torch.float32) -> None:
    for window in (None, 100):
        assert_errs_little(scene.attended(window, weight_dtype), scene.attend(window))


def assert_chunks_do_not_matter(of: AttentionShape) -> None:
    """Attend to a prompt at once and, as other rows of a batch, in chunks of 1 and of 37 queries."""
    length = 530
    scene = Scene([(length, length)], of)
    for window in (None, 100):
        at_once = scene.attend(window)
        for chunk in (1, 37):
            first = np.arange(0, length, chunk)
            seq_len = np.minimum(first + chunk, length)
            chunks = PagedSequences(
                query_len=(seq_len - first).astype(np.int32),
                seq_len=seq_len.astype(np.int32),
                block_table=np.repeat(scene.sequences.block_table, len(first), axis=0),
            )
            plan = cpu_extension.plan(chunks, of, window)
            assert torch.equal(at_once, paged_attention(scene.query, scene.cache, plan, SCALE))


class TestValues:
    @pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
    @pytest.mark.parametrize("of", SHAPES.values(), ids=SHAPES)
    def test_error_is_what_the_arithmetic_allows(
        self, of: AttentionShape, dtype: torch.dtype, all_in_cpp: None
    ):
        """
        Against float64 on the same numbers, C++ errs by float32's roundings and one to the type, with and without a window.
        """
        assert_scene_errs_little(Scene(ROWS, replace(of, dtype=dtype)))

    @pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
    def test_long_chunks_may_be_left_to_pytorch(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ):
        """
        In one batch decodes run in C++ and long chunks in PyTorch, and each result stands where its query does.
        """
        monkeypatch.setattr(cpu_extension, "_longest_query", lambda _dtype: 8)
        rows = [(1, 300), (30, 70), (8, 9), (9, 9), (1, 1), (64, 130), (1, 64)]
        scene = Scene(rows, shape(9, 3, 64, 16, dtype))
        plan = cpu_extension.plan(scene.sequences, scene.of, None)
        assert isinstance(plan, cpu_extension.ExtensionPlan)
        assert plan.rest is not None
        assert (4, 30 + 9 + 64) == (plan.native.num_rows, plan.rest.num_queries)
        assert_scene_errs_little(scene, weight_dtype=dtype)  # PyTorch multiplies in the type
        chunks = cpu_extension.plan(
            Scene([(30, 70), (64, 130)], scene.of).sequences, scene.of, None
        )
        assert not isinstance(chunks, cpu_extension.ExtensionPlan)

    def test_matrix_hardware_decides_who_gets_long_chunks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """
        Long chunks of a type stay with PyTorch only where the processor multiplies matrices of that
        type itself; products of vectors are not enough.
        """
        cpuinfo = tmp_path / "cpuinfo"
        monkeypatch.setattr(cpu_features, "CPUINFO", cpuinfo)
        longest = cpu_extension._longest_query.__wrapped__
        cpuinfo.write_text("flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16\n")
        assert 16 == longest(torch.bfloat16)
        assert longest(torch.float16) == longest(torch.float32) > 2**30
        cpuinfo.write_text("flags\t\t: fpu avx512f avx512_bf16\n")
        assert longest(torch.bfloat16) > 2**30


@pytest.mark.slow
class TestOtherProcessors:
    @pytest.mark.parametrize("processor", OTHER_PROCESSORS)
    def test_narrower_vectors_err_as_little(self, processor: str, tmp_path: Path, all_in_cpp: None):
        """
        Compiled for processors with narrower vectors, every type and head size keeps the bound.
        """
        with library_for(processor, cpu_extension, "attention/paged_attention.cpp", tmp_path):
            for of in SHAPES.values():
                for dtype in TYPES.values():
                    assert_scene_errs_little(Scene(ROWS, replace(of, dtype=dtype)))

    @pytest.mark.parametrize("processor", OTHER_PROCESSORS)
    def test_narrower_vectors_keep_bits_in_any_chunk(
        self, processor: str, tmp_path: Path, all_in_cpp: None
    ):
        """
        Compiled for processors with narrower vectors, chunks of a prompt do not matter either.
        """
        with library_for(processor, cpu_extension, "attention/paged_attention.cpp", tmp_path):
            for of in CHUNKED.values():
                for dtype in TYPES.values():
                    assert_chunks_do_not_matter(replace(of, dtype=dtype))


class TestBits:
    """Exact equality of bits."""

    OF = shape(9, 3, 64, 16)

    @pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
    def test_row_is_the_same_alone_and_in_any_batch(self, dtype: torch.dtype, longest_in_cpp: int):
        """
        A row's result has the same bits alone as among others, wherever it stands, if C++ computes it.
        """
        scene = Scene(ROWS, replace(self.OF, dtype=dtype))
        for window in (None, 100):
            together = scene.attend(window)
            first = 0
            for row, (query_len, _) in enumerate(ROWS):
                own = slice(first, first + query_len)
                first += query_len
                if query_len > longest_in_cpp:
                    continue
                alone = cpu_extension.plan(some_rows(scene.sequences, [row]), scene.of, window)
                found = paged_attention(scene.query[own], scene.cache, alone, SCALE)
                assert torch.equal(together[own], found)

    @pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
    @pytest.mark.parametrize("of", CHUNKED.values(), ids=CHUNKED)
    def test_chunks_do_not_matter(self, of: AttentionShape, dtype: torch.dtype, all_in_cpp: None):
        """
        A prompt's queries get the same bits whether computed at once, in chunks or one by one.
        """
        assert_chunks_do_not_matter(replace(of, dtype=dtype))

    def test_threads_and_blocks_do_not_matter(self):
        """
        Neither the number of threads nor the size of blocks and their places change a bit.
        """
        expected = Scene(ROWS, self.OF).attend()
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(expected[:6], Scene(ROWS, self.OF).attend()[:6])
        finally:
            torch.set_num_threads(before)
        for block_size in (1, 5, 256):
            other = Scene(ROWS, replace(self.OF, block_size=block_size)).attend()
            assert torch.equal(expected[:6], other[:6])


class TestReading:
    def test_nan_stays_in_its_row(self, longest_in_cpp: int):
        """
        A row with NaN in its own keys is NaN, and its neighbours, with other keys, are as without.
        """
        scene = Scene(ROWS, shape(4, 2, 64, 16))
        clean = scene.attend()
        sick = int(scene.sequences.block_table[3, 2])
        scene.cache[sick] = NAN
        found = scene.attend()
        assert found[3].isnan().all()
        others = [row for row in range(len(clean)) if row != 3]
        assert torch.equal(clean[others], found[others])

    def test_later_and_forgotten_positions_are_not_multiplied(self, all_in_cpp: None):
        """
        NaN in a value that a query does not see, for being later or outside its window, does not reach it.
        """
        scene = Scene([(40, 200)], shape(4, 2, 64, 16))
        clean = scene.attend(window=50)
        block = int(scene.sequences.block_table[0, 11])  # positions 176 to 191
        scene.cache[block, 4] = NAN  # 180
        found = scene.attend(window=50)
        seen = torch.arange(160, 200) >= 180
        assert found[seen].isnan().all()
        assert torch.equal(clean[~seen], found[~seen])

    def test_scores_without_bound_do_what_the_definition_does(self):
        """
        A score of minus infinity weighs nothing; where every score is that, the result is NaN.
        """
        scene = Scene([(1, 300)], shape(2, 2, 64, 16))
        scene.query[:] = 1.0
        row = scene.sequences.block_table[0]
        whole = scene.attend()
        scene.cache[int(row[0]), 3, 0] = float("-inf")
        expected = reference.plan(scene.known_table(), scene.of, None)
        without = expected.attend(scene.query, scene.cache, SCALE)
        assert not torch.equal(whole, without)
        # Sums of 300 weighted values of up to 4: float32's rounding, 6e-8, of that many and their sizes.
        assert torch.allclose(without, scene.attend(), rtol=0, atol=300**0.5 * 4 * 2**-23)
        for block in row[:19]:
            scene.cache[int(block), :, 0] = float("-inf")
        assert scene.attend().isnan().all()

    def test_blocks_that_are_not_there_are_refused(self):
        """
        A table that names a block outside the cache is an error, not a read of other memory.
        """
        scene = Scene([(1, 30), (1, 5)], shape())
        scene.sequences.block_table[1, 0] = 99
        with pytest.raises(IndexError, match="name blocks 0 to 99, the cache has"):
            scene.attend()
        scene.sequences.block_table[1, 0] = -1
        with pytest.raises(IndexError, match="name blocks -1 to"):
            scene.attend()

    def test_strided_queries_are_accepted(self, longest_in_cpp: int):
        """
        Queries may be a slice of a wider tensor, as they come out of a fused projection.
        """
        scene = Scene(ROWS, shape(4, 2, 20, 16))
        expected = scene.attend()
        wide = torch.cat((scene.query, torch.full_like(scene.query, NAN)), dim=1)
        scene.query = wide[:, :4]
        assert torch.equal(expected, scene.attend())

    def test_other_number_types_are_refused(self):
        """
        A type that the library does not compute is refused by name.
        """
        scene = Scene([(1, 5)], shape())
        with pytest.raises(ValueError, match=r"not torch.float64"):
            cpu_extension.plan(scene.sequences, replace(scene.of, dtype=torch.float64), None)
