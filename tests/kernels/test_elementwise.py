"""Normalisation, gate and rotation: every implementation against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rms_norm import cpu as norm_cpu
from kernels.rms_norm import reference as norm_reference
from kernels.rope_kv_write import cpu as rope_cpu
from kernels.rope_kv_write import reference as rope_reference
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import cpu as silu_cpu
from kernels.silu_mul import reference as silu_reference
from kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""One or two roundings of values up to about 4."""

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16", "fp16"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def worst(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left.float() - right.float()).abs().max().item()


class TestRmsNorm:
    def test_definition_scales_to_unit_mean_square(self):
        """
        Without a scale of its own the result's mean square is 1, and eps counts inside the root.
        """
        x = numbers(5, 63) * 7
        ones = torch.ones(63)
        atol = TOLERANCE[torch.float32]
        mean_square = norm_reference.rms_norm(x, ones, 0.0).square().mean(1)
        assert torch.allclose(torch.ones(5), mean_square, rtol=0, atol=atol)
        zero = norm_reference.rms_norm(torch.full((1, 4), 3.0), torch.ones(4), 7.0)
        assert torch.allclose(torch.full((1, 4), 3.0 / 4.0), zero, rtol=0, atol=atol)

    @DTYPES
    def test_cpu_matches(self, dtype: torch.dtype):
        """
        The quick form gives the definition's values.
        """
        x, weight = numbers(9, 63, dtype=dtype), numbers(63, dtype=dtype, seed=1)
        expected = norm_reference.rms_norm(x, weight, 1e-5)
        assert worst(expected, norm_cpu.rms_norm(x, weight, 1e-5)) <= TOLERANCE[dtype]

    def test_definition_normalises_the_rounded_sum(self):
        """
        A residual addition is rounded into the residual first, and the result is that of the sum.
        """
        x, residual = numbers(5, 63).half(), numbers(5, 63, seed=4).half()
        total, weight = x + residual, numbers(63, seed=1).half()
        found = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, residual)
        assert torch.equal(norm_reference.rms_norm(total, weight, 1e-5), found)

    @DTYPES
    def test_cpu_adds_as_defined(self, dtype: torch.dtype):
        """
        The quick form gives the definition's sum and its norm.
        """
        x, weight = numbers(9, 63, dtype=dtype), numbers(63, dtype=dtype, seed=1)
        expected_sum = numbers(9, 63, dtype=dtype, seed=4)
        found_sum = expected_sum.clone()
        expected = norm_reference.add_rms_norm(x, expected_sum, weight, 1e-5)
        assert worst(expected, add_rms_norm(x, found_sum, weight, 1e-5)) <= TOLERANCE[dtype]
        assert torch.equal(expected_sum, found_sum)

    @pytest.mark.parametrize(
        ("residual", "sentence"),
        [
            (torch.zeros(3, 8), "one type and one shape"),
            (torch.zeros(2, 8).half(), "one type and one shape"),
            (torch.zeros(8, 2).t(), "must be adjacent"),
        ],
        ids=["shape", "dtype", "stride"],
    )
    def test_wrong_residual_is_refused(self, residual: torch.Tensor, sentence: str):
        """
        The residual must match the addition, row by row.
        """
        with pytest.raises(ValueError, match=sentence):
            add_rms_norm(numbers(2, 8), residual, numbers(8), 1e-5)

    def test_wrong_weight_is_refused(self):
        """
        The scale must have the row's size and type.
        """
        with pytest.raises(ValueError, match=r"weight must be torch.float32 of shape \[8\]"):
            rms_norm(numbers(2, 8), numbers(7), 1e-5)
        with pytest.raises(ValueError, match=r"weight must be torch.float32 of shape \[8\]"):
            rms_norm(numbers(2, 8), numbers(8).half(), 1e-5)
        with pytest.raises(ValueError, match=r"weight must be torch.float32 of shape \[8\]"):
            add_rms_norm(numbers(2, 8), numbers(2, 8), numbers(7), 1e-5)


class TestSiluMul:
    def test_definition_is_gate_times_sigmoid_times_up(self):
        """
        The first half is the gate.
        """
        found = silu_reference.silu_mul(torch.tensor([[2.0, 3.0]])).item()
        # A few roundings of float32.
        assert math.isclose(2 / (1 + math.exp(-2)) * 3, found, rel_tol=1e-6)

    @DTYPES
    def test_cpu_matches(self, dtype: torch.dtype):
        """
        The quick form gives the definition's values, contiguous.
        """
        gate_up = numbers(9, 2 * 63, dtype=dtype)
        expected = silu_reference.silu_mul(gate_up)
        found = silu_cpu.silu_mul(gate_up)
        assert worst(expected, found) <= TOLERANCE[dtype]
        assert found.is_contiguous()

    def test_odd_width_is_refused(self):
        """
        A width that has no half is refused.
        """
        with pytest.raises(ValueError, match=r"\[T, 2 \* N\]"):
            silu_mul(numbers(2, 7))


class TestRopeKvWrite:
    HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

    def scene(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        angles = numbers(5, self.HEAD_DIM // 2, seed=2)
        return {
            "qkv": numbers(5, (self.HEADS + 2 * self.KV_HEADS) * self.HEAD_DIM, dtype=dtype),
            "rotation": torch.stack((angles.cos(), angles.sin()), dim=-1),
            "kv_position": torch.tensor([3, 17, 0, 8, 6]),
            "kv_cache": torch.full((6, 3, 2, self.KV_HEADS, self.HEAD_DIM), 77.0, dtype=dtype),
        }

    def test_definition_turns_neighbouring_pairs(self):
        """
        A quarter turn takes the pair (a, b) to (-b, a), in queries and keys and not in values.
        """
        given = self.scene()
        given["rotation"] = torch.tensor([0.0, 1.0]).expand(5, self.HEAD_DIM // 2, 2)
        heads = given["qkv"].clone().view(5, -1, self.HEAD_DIM)
        query = rope_reference.rope_kv_write(**given, qk_norm=None, norm_eps=0.0)
        turned = torch.stack((-heads[..., 1::2], heads[..., 0::2]), dim=-1).flatten(-2)
        assert torch.equal(turned[:, : self.HEADS], query)
        flat = given["kv_cache"].view(18, 2, self.KV_HEADS, self.HEAD_DIM)
        assert torch.equal(turned[:, self.HEADS : -self.KV_HEADS], flat[given["kv_position"], 0])
        assert torch.equal(heads[:, -self.KV_HEADS :], flat[given["kv_position"], 1])

    @DTYPES
    @pytest.mark.parametrize("normed", [False, True])
    def test_cpu_matches_and_touches_no_other_position(self, dtype: torch.dtype, normed: bool):
        """
        The quick form gives the definition's queries and cache, and leaves every other cache position alone.
        """
        options = {"qk_norm": None, "norm_eps": 1e-5}
        if normed:
            options["qk_norm"] = numbers(6, self.HEAD_DIM, dtype=dtype, seed=3)
        expected, found = self.scene(dtype), self.scene(dtype)
        expected_query = rope_reference.rope_kv_write(**expected, **options)
        found_query = rope_cpu.rope_kv_write(**found, **options)
        assert worst(expected_query, found_query) <= TOLERANCE[dtype]
        assert worst(expected["kv_cache"], found["kv_cache"]) <= TOLERANCE[dtype]
        rest = torch.ones(18, dtype=torch.bool)
        rest[found["kv_position"]] = False
        assert (found["kv_cache"].view(18, -1)[rest] == 77.0).all()

    @pytest.mark.parametrize("run", [rope_reference.rope_kv_write, rope_cpu.rope_kv_write])
    @pytest.mark.parametrize("padding", [-1, 1], ids=["nowhere", "dummy-block"])
    def test_padding_leaves_the_others_alone(self, run, padding: int):
        """
        Tokens with no position, or all with one of block 0, change no other block and no other token.
        """
        given = self.scene()
        options = {"qk_norm": None, "norm_eps": 0.0}
        given["kv_position"] = torch.tensor([4, padding, 17, padding, padding])
        query = run(**{**given, "qkv": given["qkv"].clone()}, **options)
        alone = {name: value[[0, 2]].clone() for name, value in given.items() if name != "kv_cache"}
        cache = torch.full_like(given["kv_cache"], 77.0)
        assert torch.equal(run(**alone, kv_cache=cache, **options), query[[0, 2]])
        assert torch.equal(cache[1:], given["kv_cache"][1:])

    @pytest.mark.parametrize(
        ("name", "replacement", "sentence"),
        [
            ("qkv", torch.zeros(5, 63), "does not fit a cache"),
            ("qkv", torch.zeros(5, 64).half(), "kv_cache must be torch.float16, contiguous"),
            ("rotation", torch.zeros(4, 4, 2), r"rotation must be float32 of shape \[5, 4, 2\]"),
            ("kv_position", torch.zeros(5).int(), r"kv_position must be int64 of shape \[5\]"),
            ("qk_norm", torch.zeros(5, 8), r"qk_norm must be torch.float32 of shape \[6, 8\]"),
            ("qk_norm", torch.zeros(6, 8).half(), r"qk_norm must be torch.float32"),
        ],
    )
    def test_wrong_tensors_are_refused(self, name: str, replacement: torch.Tensor, sentence: str):
        """
        Shapes and types are checked before anything is written.
        """
        given = {**self.scene(), name: replacement}
        with pytest.raises(ValueError, match=sentence):
            rope_kv_write(**given)
        assert (given["kv_cache"] == 77.0).all()
