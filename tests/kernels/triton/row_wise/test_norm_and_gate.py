"""Triton's rms_norm, add_rms_norm and silu_mul against their definitions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.rms_norm import reference as norm_reference
from kernels.rms_norm import triton_kernel as norm_triton
from kernels.silu_mul import reference as gate_reference
from kernels.silu_mul import triton_kernel as gate_triton
from tests.kernels.triton.row_wise.elementwise import assert_as_exact, each_dtype, numbers

EPS = 1e-5


class TestRmsNorm:
    @each_dtype
    @pytest.mark.parametrize("shape", [(3, 1), (5, 63), (2, 576), (1, 2048), (2, 3, 80)], ids=str)
    def test_matches_the_definition(self, shape, dtype, device):
        """
        Rows of any length, under any number of leading dimensions, are normalised as defined.
        """
        x = (numbers(*shape, dtype=dtype) * 3).to(device)
        weight = numbers(shape[-1], dtype=dtype, seed=1).to(device)
        found = norm_triton.rms_norm(x, weight, EPS)
        assert x.shape == found.shape
        assert_as_exact(
            norm_reference.rms_norm(x.float(), weight.float(), EPS),
            found,
        )

    def test_rows_lie_anywhere(self, device):
        """
        Rows that are cut out of wider ones, and columns that are not adjacent, give the same bits.
        """
        x, weight = numbers(4, 63).to(device), numbers(63, seed=1).to(device)
        expected = norm_triton.rms_norm(x, weight, EPS)
        wide = torch.full((4, 100), float("nan"), device=device)
        wide[:, 7:70] = x
        assert torch.equal(expected, norm_triton.rms_norm(wide[:, 7:70], weight, EPS))
        assert torch.equal(expected, norm_triton.rms_norm(x.t().contiguous().t(), weight, EPS))

    def test_nothing_gives_nothing(self, device):
        """
        No rows are normalised to no rows.
        """
        weight = torch.ones(8, device=device)
        x = torch.zeros((0, 8), device=device)
        assert (0, 8) == norm_triton.rms_norm(x, weight, EPS).shape
        assert (0, 8) == norm_triton.add_rms_norm(x, x.clone(), weight, EPS).shape

    def test_row_gives_the_same_bits_among_others(self, device):
        """
        A row's result depends on nothing but the row, whatever its place and company, NaN included.
        """
        x, residual = numbers(7, 576).to(device), numbers(7, 576, seed=4).to(device)
        weight = numbers(576, seed=1).to(device)
        x[3] = float("nan")
        together, sums = norm_triton.rms_norm(x, weight, EPS), residual.clone()
        added = norm_triton.add_rms_norm(x, sums, weight, EPS)
        for row in (0, 1, 2, 4, 5, 6):
            alone, total = x[row : row + 1], residual[row : row + 1].clone()
            assert torch.equal(together[row : row + 1], norm_triton.rms_norm(alone, weight, EPS))
            found = norm_triton.add_rms_norm(alone, total, weight, EPS)
            assert torch.equal(added[row : row + 1], found)
            assert torch.equal(sums[row : row + 1], total)

    def test_row_too_long_for_a_program_is_refused(self, device):
        """
        Rows that do not fit a program's registers are an error that says what does.
        """
        x = torch.zeros((1, norm_triton.MAX_WIDTH + 1), device=device)
        with pytest.raises(ValueError, match="takes up to 32768"):
            norm_triton.rms_norm(x, x[0], EPS)


class TestAddRmsNorm:
    @each_dtype
    @pytest.mark.parametrize("shape", [(3, 1), (5, 63), (2, 576)], ids=str)
    def test_matches_the_definition(self, shape, dtype, device):
        """
        The sum is rounded into the residual, and what was rounded is normalised.
        """
        x = numbers(*shape, dtype=dtype).to(device)
        residual = (numbers(*shape, dtype=dtype, seed=5) * 3).to(device)
        weight = numbers(shape[1], dtype=dtype, seed=1).to(device)
        plain, found = residual.clone(), residual.clone()
        norm_reference.add_rms_norm(x, plain, weight, EPS)
        normed = norm_triton.add_rms_norm(x, found, weight, EPS)
        assert torch.equal(plain, found)
        assert_as_exact(norm_reference.rms_norm(found.float(), weight.float(), EPS), normed)

    def test_sum_lies_in_rows_cut_out_of_wider_ones(self, device):
        """
        A residual that is part of a wider tensor is overwritten and its surroundings are not.
        """
        x, residual = numbers(4, 63).to(device), numbers(4, 63, seed=5).to(device)
        wide = torch.full((4, 100), float("nan"), device=device)
        wide[:, 7:70] = residual
        norm_triton.add_rms_norm(x, wide[:, 7:70], torch.ones(63, device=device), EPS)
        assert torch.equal(x + residual, wide[:, 7:70])
        assert wide[:, :7].isnan().all()
        assert wide[:, 70:].isnan().all()


class TestSiluMul:
    @each_dtype
    @pytest.mark.parametrize("width", [1, 63, 1024, 1100])
    def test_matches_the_definition(self, width, dtype, device):
        """
        Gates of any width are computed as defined, and the input stays as it is.
        """
        gate_up = (numbers(3, 2 * width, dtype=dtype) * 3).to(device)
        before = gate_up.clone()
        found = gate_triton.silu_mul(gate_up)
        assert torch.equal(before, gate_up)
        assert found.is_contiguous()
        assert_as_exact(gate_reference.silu_mul(gate_up.float()), found)

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
    def test_large_gates_saturate(self, device):
        """
        Gates so large that their exponential overflows give the other factor or zero, not NaN.
        """
        gate_up = torch.tensor([[1e4, -1e4, 2.0, 3.0]], device=device)
        assert [[2e4, 0.0]] == gate_triton.silu_mul(gate_up).tolist()

    def test_row_gives_the_same_bits_among_others(self, device):
        """
        A row's result depends on nothing but the row, wherever it lies.
        """
        wide = torch.full((5, 300), float("nan"), device=device)
        wide[:, 20:146] = numbers(5, 126).to(device)
        wide[2, 20] = float("nan")
        together = gate_triton.silu_mul(wide[:, 20:146])
        for row in (0, 1, 3, 4):
            alone = gate_triton.silu_mul(wide[row : row + 1, 20:146].clone())
            assert torch.equal(together[row : row + 1], alone)

    def test_nothing_gives_nothing(self, device):
        """
        No rows give no rows, and no columns no columns.
        """
        assert (0, 4) == gate_triton.silu_mul(torch.zeros((0, 8), device=device)).shape
        assert (3, 0) == gate_triton.silu_mul(torch.zeros((3, 0), device=device)).shape


FAR_ROWS = """
import torch
from kernels.rms_norm import triton_kernel as norm
from kernels.silu_mul import triton_kernel as gate

width, stride = 64, 1_100_000_000
assert 2 * stride > 2**31
lying_far_apart = torch.empty(2 * stride + width, dtype=torch.float16).as_strided(
    (3, width), (stride, 1)
)
near = torch.arange(3 * width).view(3, width).half() / 50
lying_far_apart.copy_(near)
weight = torch.ones(width, dtype=torch.float16)
expected = norm.rms_norm(near, weight, 1e-5)
assert torch.equal(expected, norm.rms_norm(lying_far_apart, weight, 1e-5))
assert torch.equal(gate.silu_mul(near), gate.silu_mul(lying_far_apart))
expected = norm.rms_norm(near + near, weight, 1e-5)
assert torch.equal(expected, norm.add_rms_norm(lying_far_apart, lying_far_apart, weight, 1e-5))
assert torch.equal(near + near, lying_far_apart)
"""


@pytest.mark.slow
class TestOffsets:
    def test_rows_beyond_32_bits_are_read_where_they_are(self):
        """
        Rows more than 2**31 elements apart are normalised, added to and gated like rows side by side.
        """
        # An offset that wraps reads outside the process's memory, so a process of its own does it.
        done = subprocess.run(
            [sys.executable, "-c", FAR_ROWS],
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
