"""Products in chunks: the parts of several ranks add up to the bits of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.linear import cpu, linear, reference
from tests.kernels.linear.chunks import NUM_CHUNKS, one_after_another, telling
from tests.kernels.triton.row_wise.elementwise import numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    pytest.param(300, 112, id="300x112"),
    pytest.param(768, 2048, id="768x2048"),
    pytest.param(48, 40, id="48x40", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Let a test change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestChunks:
    @pytest.mark.parametrize("width", [24, 112, 2048])
    def test_they_are_added_as_a_tree(self, width, dtype):
        """
        Where sums of chunks are exact the result has the definition's bits, which are not those of
        another order.
        """
        x, weight = telling(5, width, 70, dtype)
        expected = reference.linear(x, weight, None, None, NUM_CHUNKS, torch.float32)
        assert not torch.equal(one_after_another(x, weight), expected)
        found = linear(x, weight, num_chunks=NUM_CHUNKS, dtype=torch.float32)
        assert torch.equal(expected, found)

    @pytest.mark.parametrize(("num_columns", "width"), SHAPES)
    def test_parts_of_two_and_four_ranks_add_up_to_the_bits_of_one(self, num_columns, width, dtype):
        """
        Slices of the width, multiplied in other numbers of threads and added as a tree in float32, then
        bias and residual, rounded once, are the whole product.
        """
        x, weight = numbers(19, width, dtype=dtype), numbers(num_columns, width, dtype=dtype)
        bias = numbers(num_columns, dtype=dtype, seed=1)
        residual = numbers(19, num_columns, dtype=dtype, seed=2)
        whole = linear(x, weight, bias, residual=residual.clone(), num_chunks=NUM_CHUNKS)
        for size in (1, 2, 4):
            torch.set_num_threads(size)
            shares = zip(x.chunk(size, dim=1), weight.chunk(size, dim=1), strict=True)
            own = {"num_chunks": NUM_CHUNKS // size, "dtype": torch.float32}
            parts = [linear(rows, columns.contiguous(), **own) for rows, columns in shares]
            total = reference.tree_sum(parts) + bias + residual
            assert torch.equal(total.to(dtype), whole), size

    @pytest.mark.parametrize(("num_columns", "width"), SHAPES)
    def test_columns_of_two_and_four_ranks_have_the_bits_of_one(self, num_columns, width, dtype):
        """
        A part of the columns has the same bits alone, in any number of threads, with few rows and many.
        """
        weight = numbers(num_columns, width, dtype=dtype)
        for num_rows in (3, 70):
            x = numbers(num_rows, width, dtype=dtype)
            torch.set_num_threads(3)
            whole = linear(x, weight)
            for size in (2, 4):
                torch.set_num_threads(size // 2)
                found = [linear(x, part.clone()) for part in weight.chunk(size)]
                assert torch.equal(whole, torch.cat(found, dim=1)), (num_rows, size)

    def test_row_has_the_same_bits_alone_and_among_others(self, dtype):
        """
        Rows of a product in chunks have the bits that they have alone.
        """
        x, weight = numbers(70, 112, dtype=dtype), numbers(64, 112, dtype=dtype)
        expected = torch.cat([linear(row[None], weight, num_chunks=NUM_CHUNKS) for row in x])
        assert torch.equal(expected, linear(x, weight, num_chunks=NUM_CHUNKS))


class TestLibrary:
    def test_products_that_follow_the_threads_are_left_out(self, monkeypatch):
        """
        A library that rounds by its threads and by the number of columns gives a column the same bits
        on any rank: it multiplies the same tiles in one thread.
        """
        monkeypatch.setattr(cpu, "_smallest", {})
        monkeypatch.setattr(cpu, "_agreeing", {})
        product = torch.mm

        def fickle(rows: torch.Tensor, *rest: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
            result = product(rows, *rest, **out)
            noise = torch.get_num_threads() + result.shape[1]
            return result.mul_(1 + noise * 2.0**-20)

        monkeypatch.setattr(torch, "mm", fickle)
        x, weight = numbers(20, 64), numbers(600, 64)
        torch.set_num_threads(3)
        expected = linear(x, weight)
        torch.set_num_threads(2)
        found = [linear(x, part.clone()) for part in weight.chunk(2)]
        assert torch.equal(expected, torch.cat(found, dim=1))


class TestMistakes:
    @pytest.mark.parametrize(
        ("others", "text"),
        [
            ({"num_chunks": 3}, "power of two that divides the width 12, got 3"),
            ({"num_chunks": 8}, "power of two that divides the width 12, got 8"),
            ({"num_chunks": 0}, "got 0"),
            ({"dtype": torch.float16}, r"in that type or float32, not torch\.float16"),
        ],
        ids=["three", "uneven", "none", "type"],
    )
    def test_what_does_not_fit_is_refused(self, others, text):
        """
        Numbers of chunks that make no tree and types of results that are not computed are named.
        """
        with pytest.raises(ValueError, match=text):
            linear(numbers(3, 12), numbers(4, 12), **others)
