"""Triton's rope_kv_write against its definition."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.rope_kv_write import reference, triton_kernel
from tests.kernels.triton.row_wise.elementwise import RopeScene, assert_as_exact, each_dtype


class TestRopeKvWrite:
    @each_dtype
    @pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
    @pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
    def test_matches_the_definition(self, head_dim, normed, dtype, device):
        """
        Queries and cache are the definition's for every head size, with and without a norm before.
        """
        scene = RopeScene.of(
            [21, 3, 16], head_dim=head_dim, normed=normed, dtype=dtype, device=device
        )
        stored = scene.kv_position
        exact_query, exact_cache = scene.exact().run(reference.rope_kv_write)
        query, cache = scene.run(triton_kernel.rope_kv_write)
        assert query.is_contiguous()
        assert_as_exact(exact_query, query)
        assert_as_exact(exact_cache[stored], cache[stored])

    @pytest.mark.parametrize("heads", [(1, 1), (5, 1), (9, 3), (32, 8)], ids=str)
    def test_heads_of_any_number(self, heads, device):
        """
        Query, key and value heads may share a program or end in the middle of one.
        """
        num_heads, num_kv_heads = heads
        scene = RopeScene.of(
            [5, 2], num_heads=num_heads, num_kv_heads=num_kv_heads, normed=True, device=device
        )
        expected, expected_cache = scene.run(reference.rope_kv_write)
        query, cache = scene.run(triton_kernel.rope_kv_write)
        stored = scene.kv_position
        assert_as_exact(expected, query)
        assert_as_exact(expected_cache[stored], cache[stored])

    @pytest.mark.parametrize("block_size", [1, 3, 16, 256])
    def test_no_other_position_is_touched(self, block_size, device):
        """
        Only the tokens' own positions of the cache are written, whatever the block size.
        """
        scene = RopeScene.of([7, 300, 0, 255], block_size=block_size, device=device)
        _, cache = scene.run(triton_kernel.rope_kv_write)
        rest = torch.ones(len(cache), dtype=torch.bool, device=device)
        rest[scene.kv_position] = False
        assert cache[rest].isnan().all()
        assert not cache[scene.kv_position].isnan().any()

    @pytest.mark.parametrize("padding", [-1, 0], ids=["nowhere", "dummy-block"])
    def test_padding_leaves_the_others_alone(self, padding, device):
        """
        Rows of padding, with no position or all with one of the dummy block, change neither the other rows nor any block but that.
        """
        scene = RopeScene.of([40, padding, 17, padding, padding], normed=True, device=device)
        scene.qkv[scene.kv_position == padding] = float("nan")
        query, cache = scene.run(triton_kernel.rope_kv_write)
        alone_query, alone_cache = scene.select([0, 2]).run(triton_kernel.rope_kv_write)
        assert torch.equal(alone_query, query[[0, 2]])
        assert torch.equal(alone_cache[16:].nan_to_num(), cache[16:].nan_to_num())
        assert torch.equal(alone_cache[16:].isnan(), cache[16:].isnan())
        if padding < 0:
            assert cache[:16].isnan().all()

    def test_token_gives_the_same_bits_among_others(self, device):
        """
        A token's queries, keys and values do not depend on its place in the batch or on the batch.
        """
        scene = RopeScene.of([40, 3, 17, 21, 5], normed=True, device=device)
        query, cache = scene.run(triton_kernel.rope_kv_write)
        for tokens in ([0], [4, 2], [3, 1, 0]):
            some_query, some_cache = scene.select(tokens).run(triton_kernel.rope_kv_write)
            stored = scene.kv_position[tokens]
            assert torch.equal(query[tokens], some_query)
            assert torch.equal(cache[stored], some_cache[stored])

    def test_rows_cut_out_of_wider_ones(self, device):
        """
        Rows that lie apart give the bits of rows that lie together.
        """
        scene = RopeScene.of([40, 3, 17], device=device)
        expected, expected_cache = scene.run(triton_kernel.rope_kv_write)
        wide = torch.full((3, scene.qkv.shape[1] + 9), float("nan"), device=device)
        wide[:, 4:-5] = scene.qkv
        cache = scene.kv_cache.clone()
        query = triton_kernel.rope_kv_write(
            wide[:, 4:-5], scene.rotation, scene.kv_position, cache, qk_norm=None, norm_eps=0.0
        )
        stored = scene.kv_position
        assert torch.equal(expected, query)
        assert torch.equal(expected_cache[stored], cache.view(expected_cache.shape)[stored])

    def test_no_tokens_give_no_queries(self, device):
        """
        An empty batch writes nothing.
        """
        query, cache = RopeScene.of([], device=device).run(triton_kernel.rope_kv_write)
        assert (0, 4, 64) == query.shape
        assert cache.isnan().all()


FAR_WRITE = """
import torch
from kernels.rope_kv_write import triton_kernel

positions, num_kv_heads, head_dim = 40_000, 512, 64
cache = torch.empty((positions // 16, 16, 2, num_kv_heads, head_dim), dtype=torch.float16)
qkv = torch.ones((1, (1 + 2 * num_kv_heads) * head_dim), dtype=torch.float16)
rotation = torch.tensor([1.0, 0.0]).expand(1, head_dim // 2, 2).contiguous()
place = 39_000
assert place * 2 * num_kv_heads * head_dim > 2**31
triton_kernel.rope_kv_write(
    qkv, rotation, torch.tensor([place]), cache, qk_norm=None, norm_eps=0.0
)
assert (cache.view(positions, -1)[place] == 1).all()
"""


@pytest.mark.slow
class TestOffsets:
    def test_position_beyond_32_bits_is_written_where_it_is(self):
        """
        A cache of more than 2**31 elements is written at the right place.
        """
        # An offset that wraps writes outside the process's memory, so a process of its own does it.
        done = subprocess.run(
            [sys.executable, "-c", FAR_WRITE],
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
