"""Scenes and measures that the tests of row-wise kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_error import UNIT

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
"""
Types by name. The interpreter truncates to bf16 where a GPU rounds, so that type needs a GPU.
"""

if torch.cuda.is_available():
    DTYPES["bf16"] = torch.bfloat16

each_dtype = pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))

FLOAT32_ERROR = 4e-6
"""In fp32 the definition is what counts as exact: two roundings of values below 16."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers on the CPU, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_as_exact(exact: Tensor, found: Tensor) -> None:
    """
    Assert that found values err from float32's by two roundings to their type of the largest of
    their row.
    """
    assert not found.isnan().any()
    exact = exact.double()
    if found.dtype == torch.float32:
        allowed = torch.full_like(exact, FLOAT32_ERROR)
    else:
        allowed = 2 * UNIT[found.dtype] * exact.abs().amax(dim=-1, keepdim=True)
    assert ((exact - found.double()).abs() <= allowed).all()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScene:
    """Arguments of rope_kv_write on a device, the cache filled with NaN."""

    qkv: Tensor
    rotation: Tensor
    kv_position: Tensor
    kv_cache: Tensor
    qk_norm: Tensor | None
    norm_eps: float = 1e-5

    @classmethod
    def of(
        cls,
        kv_position: list[int],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        normed: bool = False,
        device: torch.device | None = None,
    ) -> RopeScene:
        """Build a scene of tokens for these positions of a cache just large enough."""
        num_tokens, num_blocks = len(kv_position), max([0, *kv_position]) // block_size + 1
        angles = numbers(num_tokens, head_dim // 2, seed=2)
        num_all = num_heads + 2 * num_kv_heads
        cache = torch.empty((num_blocks, block_size, 2, num_kv_heads, head_dim), dtype=dtype)
        norm = numbers(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=3)
        return cls(
            qkv=numbers(num_tokens, num_all * head_dim, dtype=dtype).to(device),
            rotation=torch.stack((angles.cos(), angles.sin()), dim=-1).to(device),
            kv_position=torch.tensor(kv_position, dtype=torch.int64, device=device),
            kv_cache=cache.fill_(float("nan")).to(device),
            qk_norm=norm.to(device) if normed else None,
        )

    def exact(self) -> RopeScene:
        """
        Return the same scene in fp32: the same rounded inputs, and nothing rounded on the way.
        """
        return RopeScene(
            qkv=self.qkv.float(),
            rotation=self.rotation,
            kv_position=self.kv_position,
            kv_cache=self.kv_cache.float(),
            qk_norm=None if self.qk_norm is None else self.qk_norm.float(),
            norm_eps=self.norm_eps,
        )

    def select(self, tokens: list[int]) -> RopeScene:
        """Return a scene of some of the tokens, in this order, with a cache of their own."""
        return RopeScene(
            qkv=self.qkv[tokens],
            rotation=self.rotation[tokens],
            kv_position=self.kv_position[tokens],
            kv_cache=torch.full_like(self.kv_cache, float("nan")),
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
        )

    def run(self, implementation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """
        Return queries, and the cache as positions, ``[P, 2 * K, D]``; the scene itself stays.
        """
        cache = self.kv_cache.clone()
        query = implementation(
            self.qkv.clone(),
            self.rotation,
            self.kv_position,
            cache,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
        )
        return query, cache.view(-1, 2 * cache.shape[3], cache.shape[4])
