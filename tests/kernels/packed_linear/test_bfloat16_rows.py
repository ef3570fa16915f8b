"""Products of rows in bfloat16 with packed weights: sums are float32, results are rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import packed_linear as package
from kernels.dispatch import configure
from kernels.packed_linear import PackedWeight, cpu_extension, packed_linear
from tests.kernels.other_processors import OTHER_PROCESSORS, library_for

pytestmark = pytest.mark.compiler

SHAPES = [(1, 2, 1), (1, 400, 130), (2, 34, 50), (7, 64, 33), (13, 300, 64), (61, 130, 40)]
SHAPES += [(1, 832, 50), (16, 96, 48), (17, 832, 50), (61, 700, 100)]
"""
Rows, width and columns: full and cut panels, one tile and several, one piece of width and more,
also where a matrix unit takes 16 rows and 32 of width at a time.
"""
BLOCK_OF_ROWS = (900, 600, 33)
"""More rows than are multiplied in a go."""
ODD_WIDTH = (9, 33, 50)
"""A width that fills no whole words of two numbers: the weight is packed in float32."""
HALF_UNIT = torch.finfo(torch.bfloat16).eps / 2


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def assert_rounded_once(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    added: torch.Tensor | float = 0.0,
) -> None:
    """
    Assert that results are exact but for one rounding to bfloat16 and float32's rounding of sums.
    """
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    of_sums = (4 + x.shape[1] ** 0.5) * torch.finfo(torch.float32).eps * sizes
    exact = exact + (added.double() if isinstance(added, torch.Tensor) else added)
    error = (found.double() - exact).abs()
    assert torch.bfloat16 == found.dtype
    assert bool((error <= HALF_UNIT * 1.01 * exact.abs() + 2 * of_sums + 1e-7).all())


@pytest.fixture(scope="module", autouse=True)
def in_cpp() -> Iterator[None]:
    assert package.use_cpu_extension(wanted=True)
    yield
    package.use_cpu_extension(wanted=False)


class TestProducts:
    @pytest.mark.parametrize("shape", [*SHAPES, BLOCK_OF_ROWS, ODD_WIDTH], ids=str)
    def test_product_is_rounded_once(self, shape: tuple[int, int, int]):
        """
        A product is the exact one, but for float32's roundings of sums and one to bfloat16.
        """
        rows, width, columns = shape
        x, weight = numbers(rows, width), numbers(columns, width, seed=1)
        packed = PackedWeight.of(weight)
        assert packed.is_narrow is (width % 2 == 0)
        found = packed_linear(x, packed)
        assert (rows, columns) == tuple(found.shape)
        assert_rounded_once(found, x, weight)

    def test_bias_and_residual_are_added_before_the_rounding(self):
        """
        A bias and a residual are added to the float32 sum, and the whole is rounded once.
        """
        x, weight, bias = numbers(9, 40), numbers(37, 40, seed=1), numbers(37, seed=2)
        residual = numbers(9, 37, seed=3)
        added = residual.double() + bias.double()
        found = packed_linear(x, PackedWeight.of(weight), bias, residual=residual)
        assert found is residual
        assert_rounded_once(found, x, weight, added)

    @pytest.mark.parametrize("wide", [100, 101])
    def test_rows_may_lie_apart(self, wide: int):
        """
        Rows of a wider tensor are multiplied where they lie, also at odd places.
        """
        x, weight = numbers(6, wide), PackedWeight.of(numbers(20, 30))
        for first in (10, 11):
            rows = x[:, first : first + 30]
            assert torch.equal(
                packed_linear(rows.contiguous(), weight), packed_linear(rows, weight)
            )

    @pytest.mark.parametrize("num_threads", [1, 3])
    @pytest.mark.parametrize("width", [300, 301])
    def test_row_has_the_same_bits_alone_and_among_others(self, num_threads: int, width: int):
        """
        A row's result is the same alone and at any place among 2 to 900 others, on any number of
        threads.
        """
        x, weight = numbers(900, width), PackedWeight.of(numbers(530, width, seed=1))
        before = torch.get_num_threads()
        try:
            alone = packed_linear(x[5:6], weight)
            torch.set_num_threads(num_threads)
            for first, last in ((0, 6), (5, 7), (4, 13), (4, 20), (0, 61), (0, 900)):
                among = packed_linear(x[first:last], weight)
                assert torch.equal(alone[0], among[5 - first])
        finally:
            torch.set_num_threads(before)

    def test_row_of_nan_leaves_the_others_alone(self):
        """
        NaN and infinity in one row stay in that row.
        """
        x, weight = numbers(13, 64), PackedWeight.of(numbers(40, 64))
        expected = packed_linear(x, weight)
        x[3] = float("nan")
        x[7, 0] = float("inf")
        found = packed_linear(x, weight)
        assert torch.isnan(found[3]).all()
        assert torch.isinf(found[7]).all()
        others = [row for row in range(13) if row not in {3, 7}]
        assert torch.equal(expected[others], found[others])

    def test_no_rows_are_no_work(self):
        """
        A step without rows has an empty result.
        """
        assert (0, 40) == tuple(
            packed_linear(numbers(0, 64), PackedWeight.of(numbers(40, 64))).shape
        )

    def test_definition_multiplies_them_too(self):
        """
        Without C++ the definition keeps the same bound, with bias and residual.
        """
        x, weight, bias = numbers(5, 40), numbers(37, 40, seed=1), numbers(37, seed=2)
        residual = numbers(5, 37, seed=3)
        added = residual.double() + bias.double()
        configure({"packed_linear": "reference"})
        try:
            packed = PackedWeight.of(weight)
            assert_rounded_once(packed_linear(x, packed), x, weight)
            assert_rounded_once(packed_linear(x, packed, bias, residual=residual), x, weight, added)
        finally:
            configure({})


class TestWeights:
    def test_weight_in_bfloat16_is_packed_as_the_same_numbers_in_float32_are(self):
        """
        A checkpoint in bfloat16 is packed alike, whichever type it was loaded in.
        """
        weight = numbers(50, 24)
        from_bfloat16, from_float32 = PackedWeight.of(weight), PackedWeight.of(weight.float())
        assert from_bfloat16.is_narrow
        assert from_float32.is_narrow
        bits = [
            each.as_subclass(torch.Tensor).view(torch.int16)
            for each in (from_bfloat16, from_float32)
        ]
        assert torch.equal(*bits)

    def test_rows_of_it_can_be_had_in_bfloat16(self):
        """
        An embedding is looked up in the type of the model that it is of.
        """
        weight, index = numbers(70, 24), torch.tensor([0, 69, 31, 32, 31])
        found = PackedWeight.of(weight).rows(index, torch.bfloat16)
        assert torch.bfloat16 == found.dtype
        assert torch.equal(weight[index], found)


class TestOtherProcessors:
    @pytest.mark.slow
    @pytest.mark.parametrize("processor", OTHER_PROCESSORS)
    def test_rows_are_widened_where_pairs_are_not_multiplied(self, processor: str, tmp_path: Path):
        """
        Compiled for other processors, sums have the bits of float32 rows with the same numbers, and
        are rounded once.
        """
        with library_for(processor, cpu_extension, "products/linear.cpp", tmp_path):
            for rows, width, columns in (*SHAPES, BLOCK_OF_ROWS, ODD_WIDTH):
                x, weight = numbers(rows, width), PackedWeight.of(numbers(columns, width, seed=1))
                bias, residual = numbers(columns, seed=2), numbers(rows, columns, seed=3)
                in_float32 = packed_linear(
                    x.float(), weight, bias.float(), residual=residual.float()
                )
                found = packed_linear(x, weight, bias, residual=residual)
                assert torch.equal(in_float32.bfloat16(), found)
