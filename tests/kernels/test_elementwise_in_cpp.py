"""Normalisation, gate and rotation in C++ against their definitions."""

from __future__ import annotations

import pytest
import torch

from kernels import packed_linear, rms_norm, rope_kv_write, silu_mul
from kernels.rms_norm import cpu_extension as norm_cpp
from kernels.rms_norm import reference as norm_reference
from kernels.rope_kv_write import cpu_extension as rope_cpp
from kernels.rope_kv_write import reference as rope_reference
from kernels.silu_mul import cpu_extension as silu_cpp
from kernels.silu_mul import reference as silu_reference

pytestmark = pytest.mark.compiler

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""One or two roundings of values up to about 4; sums of squares in another order."""

GATE_RTOL = {
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}
"""
Tolerance of a gate relative to its size, which goes into the hundreds: an exponential, a quotient
and two products in float32, each a rounding or two off; in 16 bits one rounding by either side.
"""

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16", "fp16"])
WIDTHS = pytest.mark.parametrize("width", [1, 15, 64, 577])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def worst(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left.float() - right.float()).abs().max().item()


@pytest.fixture(scope="module", autouse=True)
def in_cpp():
    """A machine without a compiler fails here, aloud."""
    assert packed_linear.use_cpu_extension(wanted=True)
    yield
    packed_linear.use_cpu_extension(wanted=False)


class TestRmsNorm:
    @DTYPES
    @WIDTHS
    def test_norm_is_the_definitions(self, dtype, width):
        """
        Rows of any width, adjacent or apart, have the definition's norm.
        """
        x, weight = numbers(9, 2 * width, dtype=dtype), numbers(width, dtype=dtype, seed=1)
        for rows in (x[:, :width], x[:, width:].contiguous()):
            expected = norm_reference.rms_norm(rows, weight, 1e-5)
            found = norm_cpp.rms_norm(rows, weight, 1e-5)
            assert worst(expected, found) <= TOLERANCE[dtype]
            assert found.is_contiguous()

    @DTYPES
    def test_sum_is_normalised_as_it_is_rounded(self, dtype):
        """
        The residual holds the rounded sum, and the result is its norm.
        """
        x, weight = numbers(9, 63, dtype=dtype), numbers(63, dtype=dtype, seed=1)
        expected_sum = numbers(9, 63, dtype=dtype, seed=4)
        found_sum = expected_sum.clone()
        expected = norm_reference.add_rms_norm(x, expected_sum, weight, 1e-5)
        assert (
            worst(expected, norm_cpp.add_rms_norm(x, found_sum, weight, 1e-5)) <= TOLERANCE[dtype]
        )
        assert torch.equal(expected_sum, found_sum)


class TestSiluMul:
    @DTYPES
    @WIDTHS
    def test_gate_is_the_definitions(self, dtype, width):
        """
        Gates of any width and size, to both ends of the exponential, give the definition's values.
        """
        gate_up = numbers(9, 2 * width, dtype=dtype)
        gate_up[:4, :width] *= 40
        expected, found = silu_reference.silu_mul(gate_up), silu_cpp.silu_mul(gate_up)
        atol = TOLERANCE[dtype]
        assert torch.allclose(expected.float(), found.float(), rtol=GATE_RTOL[dtype], atol=atol)

    def test_what_is_not_finite_stays_in_its_place(self):
        """
        NaN gives NaN and infinity infinity, as defined, and their neighbours are as ever.
        """
        gate_up = numbers(2, 40)
        gate_up[0, 3], gate_up[1, 5], gate_up[1, 6] = float("nan"), float("inf"), -200.0
        expected, found = silu_reference.silu_mul(gate_up), silu_cpp.silu_mul(gate_up)
        near = GATE_RTOL[torch.float32]
        assert torch.allclose(expected, found, rtol=near, atol=near, equal_nan=True)


class TestRopeKvWrite:
    @DTYPES
    @pytest.mark.parametrize("head_dim", [6, 16, 64, 80])
    @pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk-norm"])
    def test_rotation_and_cache_are_the_definitions(self, dtype, head_dim, has_norm):
        """
        Queries are turned, keys turned and written, values written, with and without norms; the
        rest of the cache stays as it was.
        """
        num_heads, num_kv_heads, tokens = 4, 2, 7
        qkv = numbers(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        angle = numbers(tokens, head_dim // 2)
        rotation = torch.stack((angle.cos(), angle.sin()), dim=-1)
        position = torch.tensor([3, 17, 8, 0, 31, 12, 9])
        qk_norm = numbers(num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
        caches = [torch.full((4, 8, 2, num_kv_heads, head_dim), 5.0, dtype=dtype) for _ in range(2)]
        options = {"qk_norm": qk_norm, "norm_eps": 1e-5}
        expected = rope_reference.rope_kv_write(
            qkv.clone(), rotation, position, caches[0], **options
        )
        found = rope_cpp.rope_kv_write(qkv.clone(), rotation, position, caches[1], **options)
        assert (tokens, num_heads, head_dim) == tuple(found.shape)
        assert worst(expected, found) <= 3 * TOLERANCE[dtype]
        assert worst(caches[0], caches[1]) <= 3 * TOLERANCE[dtype]
        untouched = [place for place in range(32) if place not in position.tolist()]
        assert (caches[1].flatten(0, 1)[untouched] == 5.0).all()

    def test_padding_is_written_nowhere(self):
        """
        Tokens with a negative position are turned, and leave the cache alone.
        """
        cache = torch.full((2, 4, 2, 1, 8), 5.0)
        rotation = torch.ones(2, 4, 2)
        rope_cpp.rope_kv_write(
            numbers(2, 32), rotation, torch.tensor([-1, -7]), cache, qk_norm=None, norm_eps=0.0
        )
        assert (cache == 5.0).all()

    def test_position_outside_the_cache_is_an_error_and_changes_nothing(self):
        """
        A position past the last block is named, before anything is written anywhere.
        """
        cache, qkv = torch.full((2, 4, 2, 1, 8), 5.0), numbers(2, 32)
        before = qkv.clone()
        with pytest.raises(IndexError, match="position 8 is outside a cache of 8 positions"):
            rope_cpp.rope_kv_write(
                qkv, torch.ones(2, 4, 2), torch.tensor([0, 8]), cache, qk_norm=None, norm_eps=0.0
            )
        assert (cache == 5.0).all()
        assert torch.equal(before, qkv)


class TestRows:
    @DTYPES
    def test_row_has_the_same_bits_alone_and_among_others(self, dtype):
        """
        Norm and gate of a row are the same alone and among so many that threads share them.
        """
        x, weight = numbers(700, 258, dtype=dtype), numbers(258, dtype=dtype, seed=1)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            normed, gated = norm_cpp.rms_norm(x, weight, 1e-5), silu_cpp.silu_mul(x)
        finally:
            torch.set_num_threads(before)
        for row in (0, 333, 699):
            one = x[row : row + 1]
            assert torch.equal(normed[row], norm_cpp.rms_norm(one, weight, 1e-5)[0])
            assert torch.equal(gated[row], silu_cpp.silu_mul(one)[0])


class TestChoice:
    def test_extension_serves_while_it_is_wanted(self):
        """
        Each operation runs in C++ from when it is asked to until it is told not to.
        """
        operations = (rms_norm, silu_mul, rope_kv_write)
        try:
            for operation in operations:
                operation.use_cpu_extension(wanted=True)
                assert "cpu_extension" in operation._operation.on(torch.device("cpu")).__module__
        finally:
            for operation in operations:
                operation.use_cpu_extension(wanted=False)
                assert (
                    "cpu_extension" not in operation._operation.on(torch.device("cpu")).__module__
                )
