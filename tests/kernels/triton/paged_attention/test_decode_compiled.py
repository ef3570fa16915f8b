"""Decode attention compiled for sm_90: what every row of its table takes."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention.tuning import DECODE_TILES, padded_head_dim
from tests.kernels.triton.compiled import CompiledKernel, LaunchRequest, compile_launches

REGISTERS_PER_MULTIPROCESSOR = 65536
SHARED_BYTES_PER_MULTIPROCESSOR = 227 * 1024

BLOCK_SIZES = (16, 100, 128)
"""More tiles than blocks, blocks of no power of two, and no more tiles than blocks."""

CALLS = [
    {"head_dim": head_dim, "block_size": block_size, "dtype": "bfloat16", "num_splits": num_splits}
    for head_dim in (64, 80, 96, 128, 256)
    for block_size in (BLOCK_SIZES if head_dim in {64, 128, 256} else (100,))
    for num_splits in (1, 2)
]
CALLS += [
    {"head_dim": head_dim, "block_size": 100, "dtype": "float16", "num_splits": 1}
    for head_dim in (64, 80, 128, 256)
]
CALLS += [
    {"head_dim": head_dim, "block_size": block_size, "dtype": dtype, "window": 1024}
    for dtype, block_size, head_dims in (
        ("bfloat16", 100, (64, 128, 256)),
        ("float32", 7, (64, 80, 96, 128, 144, 256)),
    )
    for head_dim in head_dims
]
CALLS += [
    {"head_dim": 256, "block_size": block_size, "dtype": "float32", "num_splits": num_splits}
    for block_size in (16, 100)
    for num_splits in (1, 2)
]
CALLS += [
    {"head_dim": 128, "block_size": 16, "dtype": "bfloat16", "group_size": group_size}
    for group_size in (1, 7, 20)
]


@pytest.fixture(scope="module")
def launches() -> list[tuple[dict[str, object], list[CompiledKernel]]]:
    requests = [
        LaunchRequest(
            call="tests.kernels.triton.paged_attention.decode_launches:launch_decode",
            arguments=call,
        )
        for call in CALLS
    ]
    return list(zip(CALLS, compile_launches(requests), strict=True))


def warps(call: dict) -> int:
    itemsize = getattr(torch, call["dtype"]).itemsize
    return DECODE_TILES[padded_head_dim(call["head_dim"]), itemsize].num_warps


@pytest.mark.slow
class TestCompiled:
    def test_every_row_of_the_table_is_covered(self):
        """
        Each row of the table belongs to a call that is compiled.
        """
        rows = {
            (padded_head_dim(call["head_dim"]), getattr(torch, call["dtype"]).itemsize)
            for call in CALLS
        }
        assert set(DECODE_TILES) == rows

    def test_nothing_spills(self, launches):
        """
        Neither kernel keeps registers in memory, for any head size, number type or block size, with a window or without.
        """
        spilling = [
            (call, kernel.name) for call, kernels in launches for kernel in kernels if kernel.spills
        ]
        assert [] == spilling

    def test_programs_share_a_multiprocessor(self, launches):
        """
        In 16 bits at least 2 programs fit a multiprocessor at once, 3 up to head size 128.
        """
        for call, (kernel, *_) in launches:
            if call["dtype"] != "float32":
                by_registers = REGISTERS_PER_MULTIPROCESSOR // (kernel.registers * 32 * warps(call))
                by_shared = SHARED_BYTES_PER_MULTIPROCESSOR // (kernel.shared_bytes + 1024)
                wanted = 3 if call["head_dim"] <= 128 else 2
                assert wanted <= min(by_registers, by_shared), call

    def test_keys_are_copied_ahead_and_multiplied_by_the_matrix_units(self, launches):
        """
        Keys and values come by asynchronous copies of 16 bytes; 16-bit products use mma.
        """
        for call, (kernel, *_) in launches:
            assert "decode_kernel" == kernel.name
            assert "cp.async.cg.shared.global" in kernel.ptx, call
            assert call["dtype"] == "float32" or "mma.sync" in kernel.ptx, call

    def test_second_launch_only_merges(self, launches):
        """
        With splits a second, small kernel merges the chunks; without, there is one launch.
        """
        for call, kernels in launches:
            merging = ["merge_kernel"] if call.get("num_splits", 2) > 1 else []
            assert ["decode_kernel", *merging] == [kernel.name for kernel in kernels]
            assert all(kernel.registers <= 64 for kernel in kernels[1:])
