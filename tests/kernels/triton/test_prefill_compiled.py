"""What prefill attention takes on sm_90, for every row of its table of tiles."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from kernels.paged_attention.triton_prefill_tiles import TILE_FIELDS, TileSize, power_of_two
from kernels.paged_attention.triton_prefill_tiles import tile_size as size_of
from tests.kernels.test_paged_attention import shape
from tests.kernels.triton.compiled import (
    MAX_SHARED_BYTES,
    CompiledKernel,
    KernelRequest,
    compile_kernels,
)

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case(NamedTuple):
    """A model's heads and cache, and which tiles; 32 heads share 8 key heads."""

    head_dim: int
    block_size: int
    window: int
    dtype: str
    is_short: bool

    @property
    def size(self) -> TileSize:
        of = shape(32, 8, self.head_dim, self.block_size, TYPES[self.dtype])
        return size_of(of, is_short=self.is_short)

    @property
    def request(self) -> KernelRequest:
        tensors = dict.fromkeys(("query", "kv_cache", "out"), f"*{self.dtype}")
        strides = ("query_stride", "head_stride", "table_stride")
        return KernelRequest(
            kernel="kernels.paged_attention.triton_prefill:prefill_kernel",
            types=tensors
            | {"block_table": "*i32", "tiles": "*i32", "qk_scale": "fp32"}
            | dict.fromkeys(strides, "i32"),
            constexprs={
                "KV_HEADS": 8,
                "GROUP": 4,
                "HEAD_DIM": self.head_dim,
                "HEAD_DIM_PADDED": power_of_two(self.head_dim),
                "BLOCK_SIZE": self.block_size,
                "WINDOW": self.window,
                "ROWS": self.size.rows,
                "KEYS": self.size.keys,
                "TILE_FIELDS": TILE_FIELDS,
            },
            divisible=strides[:2],
            num_warps=self.size.num_warps,
            num_stages=self.size.num_stages,
        )


MAX_REGISTERS = {64: 148, 128: 218, 256: 255}
"""Per thread by padded head size: a little over what was measured, and no more than there are."""

CASES = [
    *(Case(dim, 16, 0, "bf16", short) for dim in (64, 80, 96, 128, 256) for short in (True, False)),
    *(Case(128, block, 1024, "bf16", short) for block in (7, 64) for short in (True, False)),
    *(Case(dim, 128, 0, "bf16", False) for dim in (64, 128, 256)),
    *(Case(256, 7, 1024, "bf16", short) for short in (True, False)),
    Case(128, 32, 0, "fp16", is_short=False),
    *(Case(dim, 7, 1024, "fp32", False) for dim in (64, 96, 128, 256)),
]


@functools.cache
def compiled() -> dict[Case, CompiledKernel]:
    return dict(zip(CASES, compile_kernels([case.request for case in CASES]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
class TestPrefillOnHopper:
    def test_nothing_spills_and_a_program_fits(self, case: Case):
        """
        A program keeps its registers out of memory, and its keys and values in shared memory.
        """
        found = compiled()[case]
        assert not found.spills
        assert found.registers <= MAX_REGISTERS[power_of_two(case.head_dim)]
        assert found.shared_bytes <= MAX_SHARED_BYTES

    def test_loads_run_ahead_and_products_take_tensor_cores(self, case: Case):
        """
        Keys and values are copied 16 bytes at a time while products run; those of 16-bit numbers are Hopper's own.
        """
        found = compiled()[case]
        assert "cp.async.cg.shared.global" in found.ptx
        assert ("wgmma.mma_async" in found.ptx) == (case.dtype != "fp32")
