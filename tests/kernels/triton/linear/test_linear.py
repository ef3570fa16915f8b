"""The product in Triton against its definition, and the bits of its rows."""

from __future__ import annotations

import pytest
import torch
import triton

from kernels.linear import reference
from kernels.linear.triton_kernel import linear
from kernels.linear.tuning import linear_tuning, splits
from tests.kernels.triton.row_wise.elementwise import numbers

HALF = torch.float16
DTYPES = [HALF, pytest.param(torch.float32, marks=pytest.mark.slow)]
if not triton.knobs.runtime.interpret:  # the interpreter multiplies the bit patterns of bfloat16
    DTYPES.append(torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, HALF: 2e-3, torch.bfloat16: 1e-2}
"""Relative to the largest result: one rounding, and sums in another order."""

SHAPES = [
    pytest.param(70, 100, id="70x100"),
    pytest.param(3, 520, id="3x520"),
    pytest.param(64, 256, id="64x256", marks=pytest.mark.slow),
    pytest.param(130, 7, id="130x7", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestProduct:
    @pytest.mark.parametrize("split", [False, True], ids=["direct", "split"])
    @pytest.mark.parametrize(("num_columns", "width"), SHAPES)
    def test_matches_the_definition(self, num_columns, width, dtype, split, device):
        """
        Sizes of any kind give the definition's sums, with bias and residual.
        """
        x, weight = numbers(5, width, dtype=dtype), numbers(num_columns, width, dtype=dtype)
        bias = numbers(num_columns, dtype=dtype, seed=1)
        residual = numbers(5, num_columns, dtype=dtype, seed=2)
        expected = reference.linear(x, weight, bias, residual.clone())
        given = (tensor.to(device) for tensor in (x, weight, bias, residual))
        found = linear(*given, split=split).cpu()
        error = (expected.float() - found.float()).abs().max() / expected.float().abs().max()
        assert error <= TOLERANCE[dtype]

    @pytest.mark.usefixtures("rows_alone_in_products")
    @pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
    def test_half_of_the_chunks_has_the_bits_of_its_subtree(self, dtype, split, device):
        """
        Halves and quarters of the width, multiplied apart and added up in float32 as a tree, have the
        bits of the whole in four chunks, however programs share them; bias and residual come last.
        """
        width = 2080 if dtype.itemsize == 2 else 1040  # the last part of a chunk is shorter
        x, weight = numbers(5, width, dtype=dtype), numbers(70, width, dtype=dtype)
        bias, residual = numbers(70, dtype=dtype, seed=1), numbers(5, 70, dtype=dtype, seed=2)
        assert linear_tuning(width // 4, dtype).num_parts > 1
        given = [tensor.to(device) for tensor in (x, weight, bias, residual)]
        whole = linear(*given[:3], given[3].clone(), 4, split=split).cpu()
        for num_ranks in (1, 2, 4):
            shares = zip(*(each.chunk(num_ranks, dim=1) for each in given[:2]), strict=True)
            own = (4 // num_ranks, torch.float32)
            parts = [
                linear(rows, columns.contiguous(), None, None, *own, split=not split).cpu()
                for rows, columns in shares
            ]
            total = reference.tree_sum(parts) + bias.float() + residual.float()
            assert torch.equal(total.to(dtype), whole)

    @pytest.mark.usefixtures("rows_alone_in_products")
    def test_column_has_the_same_bits_beside_fewer_others(self, dtype, device):
        """
        Some of a weight's columns alone have the bits that they have among all.
        """
        x, weight = numbers(5, 1040, dtype=dtype), numbers(300, 1040, dtype=dtype)
        expected = linear(x.to(device), weight.to(device), None, None)
        for first, last in ((0, 75), (75, 150), (150, 300)):
            found = linear(x.to(device), weight[first:last].to(device), None, None)
            assert torch.equal(expected[:, first:last], found)

    @pytest.mark.usefixtures("rows_alone_in_products")
    def test_row_has_the_same_bits_alone_and_among_others(self, dtype, device):
        """
        Rows have the bits that they have alone, whether one program or several compute a tile's
        parts.
        """
        width = 520 if dtype.itemsize == 2 else 260
        x = numbers(66, width, dtype=dtype).to(device)
        weight = numbers(9, width, dtype=dtype).to(device)
        assert linear_tuning(width, dtype).num_parts > 1
        expected = linear(x, weight, None, None, split=False)
        assert torch.equal(expected, linear(x, weight, None, None, split=True))
        for row, split in ((0, True), (33, False), (65, True)):
            alone = linear(x[row : row + 1], weight, None, None, split=split)
            assert torch.equal(expected[row : row + 1], alone), (row, split)

    def test_nothing_else_is_written(self, dtype, device):
        """
        Rows after the batch stay what they were.
        """
        x, weight = numbers(3, 40, dtype=dtype), numbers(9, 40, dtype=dtype)
        held = torch.full((5, 9), 7.0, dtype=dtype, device=device)
        linear(x.to(device), weight.to(device), None, held[:3])
        assert torch.equal(torch.full((2, 9), 7.0, dtype=dtype), held[3:].cpu())

    def test_no_rows_give_no_rows(self, dtype, device):
        """
        An empty batch launches nothing.
        """
        x, weight = numbers(0, 40, dtype=dtype), numbers(9, 40, dtype=dtype)
        assert (0, 9) == linear(x.to(device), weight.to(device), None, None).shape


class TestTuning:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("width", [64, 576, 1000, 4096, 14336])
    def test_parts_cover_a_chunk_once(self, width, dtype):
        """
        All parts but the last are full, and none is empty.
        """
        found = linear_tuning(width, dtype)
        tiles = -(-width // found.depth)
        assert (found.num_parts - 1) * found.part_tiles < tiles
        assert tiles <= found.num_parts * found.part_tiles

    def test_few_rows_of_a_narrow_weight_occupy_the_device(self):
        """
        A decode's products are shared by over two hundred programs, a long prompt's are not split.
        """
        found = linear_tuning(4096, torch.bfloat16)
        assert splits(found, num_rows=1, num_columns=4096)
        assert found.num_parts * 4096 // found.columns >= 200
        assert not splits(found, num_rows=2048, num_columns=4096)

    def test_other_types_are_refused(self):
        """
        Numbers of eight bytes are named.
        """
        with pytest.raises(ValueError, match=r"2 or 4 bytes, got torch\.float64"):
            linear_tuning(8, torch.float64)

    def test_more_chunks_than_it_adds_are_refused(self):
        """
        A tree of eight chunks is named.
        """
        with pytest.raises(ValueError, match="up to 4 chunks, got 8"):
            linear(numbers(1, 64), numbers(2, 64), None, None, 8)
