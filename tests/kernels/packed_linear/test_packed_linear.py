"""Products with packed weights, in C++ and by their definition."""

from __future__ import annotations

import pytest
import torch

from kernels import packed_linear as package
from kernels.dispatch import configure
from kernels.packed_linear import (
    PackedWeight,
    can_pack,
    packed_dtype,
    packed_elements,
    packed_linear,
    reference,
)

pytestmark = pytest.mark.compiler

CPU = torch.device("cpu")
SHAPES = [(1, 1, 1), (2, 33, 50), (7, 64, 32), (12, 5, 97), (13, 300, 64), (61, 129, 40)]
"""Rows, width and columns: full and cut panels, one tile and several, one piece of width and more."""
BLOCK_OF_ROWS = (700, 400, 33)
"""More rows than are multiplied in a go."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def narrow_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that bfloat16 holds, in float32."""
    return numbers(*shape, seed=seed).bfloat16().float()


def packed_wide(weight: torch.Tensor) -> PackedWeight:
    """Pack in float32, whatever the numbers."""
    return PackedWeight.of(weight, torch.empty(packed_elements(*weight.shape)))


def relative_error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the largest error in units of float32 rounding of the sum of products' sizes."""
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T + 1e-30
    return float(((found.double() - exact).abs() / scale).max()) / torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", autouse=True)
def in_cpp():
    assert package.use_cpu_extension(wanted=True)
    yield
    package.use_cpu_extension(wanted=False)


class TestProducts:
    @pytest.mark.parametrize("shape", [*SHAPES, BLOCK_OF_ROWS], ids=str)
    def test_product_is_the_definitions(self, shape):
        """
        Sums are within float32's rounding of the exact product, and every element is written.
        """
        rows, width, columns = shape
        x, weight = numbers(rows, width), numbers(columns, width, seed=1)
        found = packed_linear(x, PackedWeight.of(weight))
        assert (rows, columns) == tuple(found.shape)
        assert 2 + width**0.5 > relative_error(found, x, weight)

    def test_bias_and_residual_are_added(self):
        """
        A bias is added to every row, and a residual is overwritten with the sum.
        """
        x, weight, bias = numbers(9, 40), PackedWeight.of(numbers(37, 40)), numbers(37, seed=2)
        residual = numbers(9, 37, seed=3)
        plain, before = packed_linear(x, weight), residual.clone()
        assert torch.equal(plain + bias, packed_linear(x, weight, bias))
        found = packed_linear(x, weight, bias, residual=residual)
        assert found is residual
        assert torch.equal(before + (plain + bias), residual)

    def test_rows_may_lie_apart(self):
        """
        Rows of a wider tensor are multiplied where they lie.
        """
        wide, weight = numbers(6, 100), PackedWeight.of(numbers(20, 30))
        rows = wide[:, 10:40]
        assert torch.equal(packed_linear(rows.contiguous(), weight), packed_linear(rows, weight))

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_row_has_the_same_bits_alone_and_among_others(self, num_threads):
        """
        A row's result is the same alone and at any place among 2 to 700 others, on any number of
        threads.
        """
        x, weight = numbers(700, 300), PackedWeight.of(numbers(530, 300, seed=1))
        before = torch.get_num_threads()
        try:
            alone = packed_linear(x[5:6], weight)
            torch.set_num_threads(num_threads)
            for first, last in ((0, 6), (5, 7), (4, 20), (0, 61), (0, 700)):
                among = packed_linear(x[first:last], weight)
                assert torch.equal(alone[0], among[5 - first])
        finally:
            torch.set_num_threads(before)

    def test_row_of_nan_leaves_the_others_alone(self):
        """
        NaN in one row stays in that row.
        """
        x, weight = numbers(13, 64), PackedWeight.of(numbers(40, 64))
        expected = packed_linear(x, weight)
        x[3] = float("nan")
        found = packed_linear(x, weight)
        assert torch.isnan(found[3]).all()
        others = [row for row in range(13) if row != 3]
        assert torch.equal(expected[others], found[others])

    def test_no_rows_are_no_work(self):
        """
        A step without rows has an empty result.
        """
        assert (0, 40) == tuple(
            packed_linear(numbers(0, 64), PackedWeight.of(numbers(40, 64))).shape
        )


class TestNarrowWeights:
    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 19, 40, 300, 700])
    def test_product_has_the_bits_of_a_float32_weight(self, rows):
        """
        Numbers kept in bfloat16 give the bits of the same numbers in float32, in one tile and in
        many, in one piece of width and in more.
        """
        for width, columns in ((2, 1), (64, 97), (402, 130)):
            x, weight = numbers(rows, width), narrow_numbers(columns, width, seed=1)
            narrow, wide = PackedWeight.of(weight), packed_wide(weight)
            assert (True, False) == (narrow.is_narrow, wide.is_narrow)
            assert 2 * narrow.nbytes == wide.nbytes
            assert torch.equal(packed_linear(x, wide), packed_linear(x, narrow))

    def test_bias_and_residual_are_added_as_to_any(self):
        """
        A bias and a residual change nothing about that.
        """
        x, weight, bias = numbers(9, 40), narrow_numbers(37, 40), numbers(37, seed=2)
        expected, found = numbers(9, 37, seed=3), numbers(9, 37, seed=3)
        packed_linear(x, packed_wide(weight), bias, residual=expected)
        packed_linear(x, PackedWeight.of(weight), bias, residual=found)
        assert torch.equal(expected, found)

    def test_row_has_the_same_bits_alone_and_among_others(self):
        """
        A row's result is the same alone and among 2 to 700 others.
        """
        x, weight = numbers(700, 300), PackedWeight.of(narrow_numbers(530, 300, seed=1))
        alone = packed_linear(x[5:6], weight)
        for first, last in ((5, 7), (4, 13), (4, 20), (0, 61), (0, 700)):
            assert torch.equal(alone[0], packed_linear(x[first:last], weight)[5 - first])

    def test_numbers_at_the_ends_of_the_range_are_kept(self):
        """
        Infinities, NaN, both zeros, the largest and the smallest numbers are what they were.
        """
        ends = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3.3895e38, 1e-38, 9.2e-41]
        weight = torch.tensor([[end, 0.0] for end in ends]).bfloat16().float()
        packed = PackedWeight.of(weight)
        assert packed.is_narrow
        found = packed_linear(torch.tensor([[1.0, 0.0]]), packed)
        torch.testing.assert_close(weight[:, 0], found[0], rtol=0, atol=0, equal_nan=True)
        rows = packed.rows(torch.arange(len(ends)))
        assert torch.equal(weight.view(torch.int32), rows.view(torch.int32))

    def test_one_number_that_bfloat16_lacks_keeps_a_weight_in_float32(self):
        """
        Packing rounds nothing: one number of more digits, wherever it is, keeps a weight in
        float32.
        """
        weight = narrow_numbers(1100, 1000)
        assert torch.bfloat16 == packed_dtype(weight)
        weight[-1, -1] = 1 + 2**-9
        assert torch.float32 == packed_dtype(weight)
        assert not PackedWeight.of(weight[-3:]).is_narrow
        with pytest.raises(ValueError, match=r"must be torch.float32 .* got torch.bfloat16"):
            PackedWeight.of(weight[-3:], torch.empty(48 * 1000, dtype=torch.bfloat16))

    def test_odd_width_stays_in_float32(self):
        """
        A weight that would not fill whole words of two numbers is kept in float32.
        """
        assert torch.float32 == packed_dtype(narrow_numbers(4, 33))
        assert torch.float32 == packed_dtype(narrow_numbers(4, 0))

    def test_definition_multiplies_them_too(self):
        """
        Without C++ the definition widens what was packed for it.
        """
        x, weight = numbers(5, 40), narrow_numbers(37, 40)
        configure({"packed_linear": "reference"})
        try:
            packed = PackedWeight.of(weight)
            assert packed.is_narrow
            assert torch.equal(packed_linear(x, packed_wide(weight)), packed_linear(x, packed))
        finally:
            configure({})


class TestPacking:
    @pytest.mark.parametrize("panel", [1, 16, 32])
    def test_packing_loses_nothing(self, panel):
        """
        A packed weight can be unpacked, whatever the panel.
        """
        weight = narrow_numbers(50, 8)
        for dtype in (torch.float32, torch.bfloat16):
            packed = reference.pack(weight, panel, dtype)
            assert dtype == packed.dtype
            assert torch.equal(weight, reference.unpack(packed, 50))

    def test_rows_of_a_packed_weight_are_the_weights(self):
        """
        An embedding can be looked up in the packed output projection that it shares.
        """
        index = torch.tensor([0, 69, 31, 32, 31], dtype=torch.int32)
        for weight in (numbers(70, 24), narrow_numbers(70, 24)):
            assert torch.equal(weight[index], PackedWeight.of(weight).rows(index))

    def test_weight_is_packed_where_it_is_told(self):
        """
        A weight packed into given memory lies there and nowhere else; memory of another size is
        refused.
        """
        weight = numbers(50, 33)
        memory = torch.empty(packed_elements(50, 33))
        packed = PackedWeight.of(weight, memory)
        assert memory.data_ptr() == packed.data_ptr()
        assert torch.equal(
            packed_linear(weight, PackedWeight.of(weight)), packed_linear(weight, packed)
        )
        with pytest.raises(ValueError, match="memory of this packed weight"):
            PackedWeight.of(weight, memory[1:])

    def test_packed_weight_is_no_matrix_to_the_framework(self):
        """
        A packed weight that gets where a matrix is expected is an error, not a wrong product.
        """
        with pytest.raises(RuntimeError):
            torch.nn.functional.linear(numbers(3, 64), PackedWeight.of(numbers(64, 64)))

    def test_definition_multiplies_what_was_packed_for_it(self):
        """
        Without C++ products are the definition's, of any panel, to rounding.
        """
        x, weight = numbers(5, 40), numbers(37, 40)
        configure({"packed_linear": "reference"})
        try:
            assert not can_pack(torch.float32, CPU)
            packed = PackedWeight.of(weight)
            assert 2 + 40**0.5 > relative_error(packed_linear(x, packed), x, weight)
            residual = numbers(5, 37)
            expected = packed_linear(x, packed) + residual
            assert torch.equal(expected, packed_linear(x, packed, residual=residual))
        finally:
            configure({})

    def test_only_types_that_gain_by_it_are_packed(self):
        """
        Float32 and bfloat16 are packed; float16 and other devices have better ways, and "off" means
        none.
        """
        assert can_pack(torch.float32, CPU)
        assert can_pack(torch.bfloat16, CPU)
        assert not can_pack(torch.float16, CPU)
        assert not can_pack(torch.bfloat16, torch.device("cuda"))
        assert not package.use_cpu_extension(wanted=False)
        assert not can_pack(torch.float32, CPU)
        assert package.use_cpu_extension(wanted=True)


class TestMistakes:
    def test_what_does_not_fit_is_said(self):
        """
        Types, shapes and strides that are not as described are errors that give what was found.
        """
        weight = PackedWeight.of(numbers(40, 64))
        with pytest.raises(ValueError, match=r"x must be float32 or bfloat16 of shape \[T, 64\]"):
            packed_linear(numbers(3, 63), weight)
        with pytest.raises(ValueError, match=r"x must be float32 or bfloat16"):
            packed_linear(numbers(3, 64).half(), weight)
        with pytest.raises(ValueError, match="adjacent"):
            packed_linear(numbers(64, 3).T, weight)
        with pytest.raises(ValueError, match=r"bias must be contiguous torch.float32 of .* \[40\]"):
            packed_linear(numbers(3, 64), weight, numbers(41))
        with pytest.raises(ValueError, match=r"bias must be contiguous torch.bfloat16"):
            packed_linear(numbers(3, 64).bfloat16(), weight, numbers(40))
        with pytest.raises(ValueError, match=r"residual must be .* of shape \[3, 40\]"):
            packed_linear(numbers(3, 64), weight, residual=numbers(40, 3).T)
        with pytest.raises(ValueError, match="to be packed must be float32 or bfloat16"):
            PackedWeight.of(numbers(4, 4).half())
