"""Packed products in chunks: the parts of several ranks add up to the bits of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import packed_linear as package
from kernels.dispatch import configure
from kernels.linear.reference import tree_sum
from kernels.packed_linear import PackedWeight, cpu_extension, packed_linear, reference
from tests.kernels.linear.chunks import NUM_CHUNKS, one_after_another, telling
from tests.kernels.other_processors import OTHER_PROCESSORS, library_for

pytestmark = pytest.mark.compiler

KINDS = {
    "float32": (torch.float32, torch.float32),
    "float32-narrow": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}
"""Types of rows and of what weights can be held in."""
SHAPES = [(1, 24, 50), (1, 832, 130), (7, 112, 33), (9, 40, 96), (13, 704, 64), (61, 2048, 130)]
SHAPES += [(700, 400, 33)]
"""Rows, width and columns: lone rows, one tile and several, a block and more, chunks of odd words."""


@pytest.fixture(scope="module", autouse=True)
def in_cpp() -> Iterator[None]:
    assert package.use_cpu_extension(wanted=True)
    yield
    package.use_cpu_extension(wanted=False)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_ranks(shape: tuple[int, int, int], kind: str) -> None:
    """Check that the parts of 1, 2 and 4 ranks add up to the bits of a whole product."""
    (rows, width, columns), (dtype, held) = shape, KINDS[kind]
    x, weight = numbers(rows, width).to(dtype), numbers(columns, width, seed=1).to(held).to(dtype)
    bias, residual = numbers(columns, seed=2).to(dtype), numbers(rows, columns, seed=3).to(dtype)
    packed = PackedWeight.of(weight)
    assert packed.is_narrow is (held == torch.bfloat16)
    whole = packed_linear(x, packed, bias, residual=residual.clone(), num_chunks=NUM_CHUNKS)
    for size in (1, 2, 4):
        shares = zip(x.chunk(size, dim=1), weight.chunk(size, dim=1), strict=True)
        own = {"num_chunks": NUM_CHUNKS // size, "dtype": torch.float32}
        parts = [packed_linear(part, PackedWeight.of(each), **own) for part, each in shares]
        total = tree_sum(parts) + bias + residual
        assert torch.equal(total.to(dtype), whole), (shape, size)


class TestChunks:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_parts_of_two_and_four_ranks_add_up_to_the_bits_of_one(self, shape, kind: str):
        """
        Slices of the width, multiplied apart and added as a tree in float32, then bias and
        residual, rounded once, are the whole product.
        """
        check_ranks(shape, kind)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("width", [24, 112, 704])
    def test_they_are_added_as_a_tree(self, width: int, dtype: torch.dtype):
        """
        Where sums of chunks are exact the result has the definition's bits, which are not those of
        another order.
        """
        for rows in (1, 9, 40):
            x, weight = telling(rows, width, 70, dtype)
            packed = PackedWeight.of(weight)
            expected = reference.packed_linear(
                x, PackedWeight.of(weight).data, 70, None, None, NUM_CHUNKS, torch.float32
            )
            assert not torch.equal(one_after_another(x, weight), expected)
            found = packed_linear(x, packed, num_chunks=NUM_CHUNKS, dtype=torch.float32)
            assert torch.equal(expected, found)

    @pytest.mark.parametrize("num_threads", [1, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_row_has_the_same_bits_alone_and_among_others(self, num_threads: int, dtype):
        """
        A row's result is the same alone and at any place among others, on any number of threads.
        """
        x, weight = numbers(700, 304).to(dtype), PackedWeight.of(numbers(130, 304).to(dtype))
        before = torch.get_num_threads()
        alone = packed_linear(x[5:6], weight, num_chunks=NUM_CHUNKS)
        torch.set_num_threads(num_threads)
        try:
            for first, last in ((0, 6), (5, 7), (4, 20), (0, 61), (0, 700)):
                among = packed_linear(x[first:last], weight, num_chunks=NUM_CHUNKS)
                assert torch.equal(alone[0], among[5 - first])
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("kind", KINDS)
    def test_columns_of_two_and_four_ranks_have_the_bits_of_one(self, kind: str):
        """
        A part of the columns has the same bits alone.
        """
        dtype, held = KINDS[kind]
        weight = numbers(280, 112, seed=1).to(held).to(dtype)
        for rows in (1, 8, 30):
            x = numbers(rows, 112).to(dtype)
            whole = packed_linear(x, PackedWeight.of(weight))
            for size in (2, 4):
                found = [packed_linear(x, PackedWeight.of(part)) for part in weight.chunk(size)]
                assert torch.equal(whole, torch.cat(found, dim=1))

    def test_definition_adds_them_as_a_tree_too(self):
        """
        Without C++ chunks are multiplied one by one and added in the same order.
        """
        x, weight = telling(3, 40, 70, torch.bfloat16)
        configure({"packed_linear": "reference"})
        try:
            packed = PackedWeight.of(weight)
            in_chunks = packed_linear(x, packed, num_chunks=NUM_CHUNKS, dtype=torch.float32)
        finally:
            configure({})
        chunks = zip(x.float().chunk(4, 1), weight.float().chunk(4, 1), strict=True)
        a, b, c, d = (rows @ columns.T for rows, columns in chunks)
        assert torch.equal((a + b) + (c + d), in_chunks)


class TestOtherProcessors:
    @pytest.mark.slow
    @pytest.mark.parametrize("processor", OTHER_PROCESSORS)
    def test_ranks_add_up_to_the_bits_of_one_there_too(self, processor: str, tmp_path: Path):
        """
        Compiled for other processors, parts of the width add up to the bits of the whole.
        """
        with library_for(processor, cpu_extension, "products/linear.cpp", tmp_path):
            for shape in SHAPES:
                for kind in KINDS:
                    check_ranks(shape, kind)


class TestMistakes:
    @pytest.mark.parametrize(
        ("width", "others", "text"),
        [
            (24, {"num_chunks": 3}, "power of two that divides the width 24, got 3"),
            (20, {"num_chunks": 4}, "4 chunks of a width of 20 must be even"),
            (24, {"dtype": torch.bfloat16}, r"in that type or float32, not torch\.bfloat16"),
        ],
        ids=["three", "odd", "type"],
    )
    def test_what_does_not_fit_is_refused(self, width: int, others, text: str):
        """
        Numbers of chunks that make no tree, odd chunks and narrower results are named.
        """
        with pytest.raises(ValueError, match=text):
            packed_linear(numbers(3, width), PackedWeight.of(numbers(4, width)), **others)
