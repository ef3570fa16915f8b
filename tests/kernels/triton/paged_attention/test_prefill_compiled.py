"""Prefill attention compiled for sm_90: what every row of its table of tiles takes."""

from __future__ import annotations

import re

import pytest

from kernels.paged_attention.triton_prefill_tiles import (
    SHORT_ROWS,
    TileSize,
    power_of_two,
    tile_size,
)
from tests.kernels.triton.compiled import (
    MAX_SHARED_BYTES,
    CompiledKernel,
    LaunchRequest,
    compile_launches,
)
from tests.kernels.triton.paged_attention.prefill_launches import attention_shape

MAX_REGISTERS = {64: 168, 128: 224, 256: 255}
"""
Registers per thread by padded head size: a little over what was measured, and no more than there
are.
"""

LENGTHS = {"short": SHORT_ROWS // 4, "long": SHORT_ROWS // 4 + 1}
HEAD_DIMS = (64, 80, 96, 128, 256)

CASES = [
    *((dim, 16, "bfloat16", None, length) for dim in HEAD_DIMS for length in LENGTHS),
    *((128, block, "bfloat16", 1024, length) for block in (7, 64) for length in LENGTHS),
    *((dim, 16, "bfloat16", 1024, length) for dim, length in ((64, "short"), (128, "long"))),
    *((dim, 128, "bfloat16", None, "long") for dim in (64, 128, 256)),
    *((256, block, "bfloat16", 1024, length) for block in (7, 16) for length in LENGTHS),
    (128, 32, "float16", None, "long"),
    *((dim, 7, "float32", 1024, "long") for dim in (64, 96, 128, 256)),
]
"""Head size, block size, number type, window, and the kind of tiles."""


def request(case: tuple, **others: int) -> LaunchRequest:
    head_dim, block_size, dtype, window, length = case
    return LaunchRequest(
        call="tests.kernels.triton.paged_attention.prefill_launches:launch_prefill",
        arguments={
            "head_dim": head_dim,
            "block_size": block_size,
            "dtype": dtype,
            "window": window,
            "query_len": LENGTHS[length],
            **others,
        },
    )


def size(case: tuple) -> TileSize:
    head_dim, block_size, dtype, _, length = case
    return tile_size(attention_shape(head_dim, block_size, dtype), is_short=length == "short")


@pytest.fixture(scope="module")
def launches() -> list[tuple[tuple, CompiledKernel]]:
    compiled = compile_launches([request(case) for case in CASES])
    return [(case, kernel) for case, [kernel] in zip(CASES, compiled, strict=True)]


@pytest.mark.slow
class TestCompiled:
    def test_every_size_of_tile_is_covered(self):
        """
        Each head size and number type that a model may have, with either tiles, is compiled as one of these.
        """
        wanted = {
            size((dim, block, dtype, None, length))
            for dim in range(16, 257, 8)
            for block in (16, 17)
            for dtype in ("bfloat16", "float16", "float32")
            for length in LENGTHS
        }
        assert wanted == {size(case) for case in CASES}

    def test_nothing_spills(self, launches):
        """
        A program keeps its registers out of memory, and within what its row of the table took.
        """
        for case, kernel in launches:
            assert not kernel.spills, case
            assert kernel.registers <= MAX_REGISTERS[power_of_two(case[0])], case

    def test_programs_fit_a_multiprocessor(self, launches):
        """
        Keys and values on their way fit shared memory, two programs' at once for short rows and small heads.
        """
        for case, kernel in launches:
            head_dim, length = case[0], case[-1]
            programs = 2 if head_dim <= (128 if length == "short" else 64) else 1
            assert programs * (kernel.shared_bytes + 1024) <= MAX_SHARED_BYTES, case

    def test_loads_run_ahead_and_products_take_matrix_units(self, launches):
        """
        Keys and values come by asynchronous copies of 16 bytes; 16-bit products are Hopper's own, exact ones no tensor core's.
        """
        for case, kernel in launches:
            assert "cp.async.cg.shared.global" in kernel.ptx, case
            next_on_its_way = re.search(r"cp.async.wait_group\s+[1-9]", kernel.ptx)
            assert next_on_its_way or size(case).num_stages < 5, case
            assert ("wgmma.mma_async" in kernel.ptx) == (case[2] != "float32"), case
            assert "tf32" not in kernel.ptx, case

    def test_all_batches_run_one_kernel(self):
        """
        Batches of any number of rows, of any lengths and table width, compile nothing new.
        """
        case = (64, 16, "bfloat16", None, "long")
        batches = [{"query_len": 17}, {"query_len": 300}, {"query_len": 40, "num_rows": 3}]
        compiled = compile_launches([request(case, **batch) for batch in batches])
        assert 1 == len({kernel.ptx for kernels in compiled for kernel in kernels})
