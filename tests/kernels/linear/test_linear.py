"""Products with bits of a row that depend on the row and the weight alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from structlog.testing import capture_logs

from kernels.linear import cpu, linear, reference
from tests.kernels.triton.row_wise.elementwise import numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    pytest.param(64, 112, id="64x112"),
    pytest.param(7, 33, id="7x33"),
    pytest.param(320, 64, id="320x64", marks=pytest.mark.slow),
    pytest.param(960, 576, id="960x576", marks=pytest.mark.slow),
]
ROWS = (1, 2, 15, 16, 17, 63, 64, 100, 300)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the largest result: two roundings to the type, and sums in another order."""


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test try the library's products anew."""
    monkeypatch.setattr(cpu, "_smallest", {})
    monkeypatch.setattr(cpu, "_agreeing", {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_columns", "width"), SHAPES)
class TestRows:
    def test_bits_are_the_same_alone_and_in_any_batch(self, num_columns, width, dtype):
        """
        Each of up to 300 rows has the bits that it has alone, at any place.
        """
        x, weight = numbers(max(ROWS), width, dtype=dtype), numbers(num_columns, width, dtype=dtype)
        alone = torch.cat([linear(row[None], weight) for row in x])
        for num_rows in ROWS:
            assert torch.equal(alone[:num_rows], linear(x[:num_rows], weight)), num_rows
        assert torch.equal(alone.flip(0), linear(x.flip(0), weight))

    def test_values_are_those_of_the_definition(self, num_columns, width, dtype):
        """
        With bias and residual or without, sums are those of float32 rounded to the type.
        """
        x, weight = numbers(19, width, dtype=dtype), numbers(num_columns, width, dtype=dtype)
        bias = numbers(num_columns, dtype=dtype, seed=1)
        residual = numbers(19, num_columns, dtype=dtype, seed=2)
        for given in ((None, None), (bias, None), (None, residual), (bias, residual)):
            expected = reference.linear(x, weight, given[0], _copy(given[1]))
            found = linear(x, weight, given[0], residual=_copy(given[1]))
            error = (expected.float() - found.float()).abs().max() / expected.float().abs().max()
            assert error <= TOLERANCE[dtype]


def fickle_product(product: Callable[..., torch.Tensor], *, by_place: bool = True) -> Callable:
    """
    Return a product that rounds differently for each number of rows and each alignment of what it
    reads and writes, and `by_place` for each place of a row.
    """

    def noisy(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        result = product(rows, weight, **out)
        noise = torch.full((len(rows), 1), float(len(rows)))
        noise += sum(tensor.data_ptr() % 64 for tensor in (rows, weight, result))
        if by_place:
            noise += torch.arange(len(rows))[:, None]
        return result.mul_(1 + noise * 2**-20)

    return noisy


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


class TestTiles:
    def test_residual_is_overwritten_with_the_sum(self):
        """
        The returned tensor is the residual itself.
        """
        x, weight, residual = numbers(3, 5), numbers(4, 5), numbers(3, 4, seed=1)
        expected = residual + linear(x, weight)
        assert residual is linear(x, weight, residual=residual)
        assert torch.equal(expected, residual)

    def test_no_rows_give_no_rows(self):
        """
        An empty batch has an empty product.
        """
        assert (0, 4) == linear(numbers(0, 5), numbers(4, 5)).shape

    def test_where_places_disagree_rows_are_multiplied_alone_and_the_log_says_so(self, monkeypatch):
        """
        A library that rounds a row by its place gets one row at a time, with one warning per weight shape.
        """
        monkeypatch.setattr(torch, "mm", fickle_product(torch.mm))
        x, weight = numbers(70, 24), numbers(9, 24, seed=1)
        with capture_logs() as logs:
            alone = torch.cat([linear(row[None], weight) for row in x])
            assert torch.equal(alone, linear(x, weight))
        assert ["rows_multiplied_alone"] == [entry["event"] for entry in logs]

    @pytest.mark.parametrize("width", [24, 33])
    def test_addresses_of_rows_do_not_matter(self, width, monkeypatch):
        """
        A library that rounds by the addresses it is given gives a row the same bits wherever the row lies in memory.
        """
        monkeypatch.setattr(torch, "mm", fickle_product(torch.mm, by_place=False))
        x, weight = numbers(70, width), numbers(9, width, seed=1)
        expected = linear(x, weight)
        memory = torch.zeros(x.numel() + 16)
        for first in range(16):
            moved = memory[first : first + x.numel()].view_as(x).copy_(x)
            assert torch.equal(expected, linear(moved, weight)), first
            assert torch.equal(expected[5:], linear(moved[5:], weight)), first

    def test_larger_tiles_that_disagree_are_left_out(self, monkeypatch):
        """
        Rows stay with the smallest tile where a larger one gives other bits.
        """
        x, weight = numbers(300, 24), numbers(9, 24, seed=1)
        expected = linear(x[:16], weight)
        sizes: list[int] = []
        product = torch.mm

        def noisy(rows: torch.Tensor, *rest: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
            result = product(rows, *rest, **out)
            sizes.append(len(rows))
            return result if len(rows) == 16 else result.mul_(1 + 2**-20)

        monkeypatch.setattr(torch, "mm", noisy)
        monkeypatch.setattr(cpu, "_agreeing", {})
        assert torch.equal(expected, linear(x, weight)[:16])
        sizes.clear()
        linear(x, weight)
        assert {16} == set(sizes)


class TestMistakes:
    @pytest.mark.parametrize(
        ("x", "weight", "others", "text"),
        [
            (numbers(5), numbers(4, 5), {}, r"x must have shape \[T, K\]"),
            (numbers(3, 6), numbers(4, 5), {}, r"x must have shape \[T, K\]"),
            (numbers(3, 5).half(), numbers(4, 5), {}, r"weight its type"),
            (numbers(3, 5), numbers(5, 4).t(), {}, "weight must be contiguous"),
            (numbers(3, 5), numbers(4, 5), {"bias": numbers(3)}, r"bias must be .* \[4\]"),
            (numbers(3, 5), numbers(4, 5), {"residual": numbers(4, 3).t()}, "residual must be"),
        ],
        ids=["vector", "width", "type", "transposed", "bias", "residual"],
    )
    def test_what_does_not_fit_is_refused(self, x, weight, others, text):
        """
        Shapes, types and strides that do not fit are named.
        """
        with pytest.raises(ValueError, match=text):
            linear(x, weight, **others)
