"""The product compiled for sm_90: what each row of its table takes."""

from __future__ import annotations

import functools

import pytest

from tests.kernels.triton.compiled import (
    MAX_SHARED_BYTES,
    CompiledKernel,
    LaunchRequest,
    compile_launches,
)

ODD = "odd-fp16"
CASES = {
    "qkv-8b": {"num_columns": 6144, "width": 4096, "dtype": "bfloat16", "biased": True},
    "down-8b": {"num_columns": 4096, "width": 14336, "dtype": "bfloat16", "adds": True},
    "down-8b-tree": {"num_columns": 4096, "width": 14336, "dtype": "bfloat16", "num_chunks": 4},
    "down-8b-tp2": {"num_columns": 4096, "width": 7168, "dtype": "bfloat16", "num_chunks": 2},
    ODD: {"num_columns": 1000, "width": 520, "dtype": "float16"},
    "fp32": {"num_columns": 960, "width": 576, "dtype": "float32", "adds": True},
}
MAX_REGISTERS = 255
"""Registers per thread: with 128 threads, two programs then fit a multiprocessor."""


def _request(case: dict[str, object], num_rows: int) -> LaunchRequest:
    return LaunchRequest(
        call="tests.kernels.triton.linear.linear_launches:launch_linear",
        arguments={**case, "num_rows": num_rows, "split": num_rows <= 64},
    )


@functools.cache
def compiled() -> dict[tuple[str, int], list[CompiledKernel]]:
    """
    Compile every case for one row, which splits, and for many, by one process; one for others too.
    """
    wanted = [(name, num_rows) for name in CASES for num_rows in (1, 2048)]
    wanted += [(ODD, num_rows) for num_rows in (16, 33)]
    launches = compile_launches([_request(CASES[name], num_rows) for name, num_rows in wanted])
    return dict(zip(wanted, launches, strict=True))


@pytest.mark.slow
class TestCompiled:
    @pytest.mark.parametrize("name", CASES)
    def test_two_programs_fit_a_multiprocessor(self, name: str):
        """
        No kernel spills, and registers and shared memory suffice for two programs at once.
        """
        for num_rows in (1, 2048):
            for kernel in compiled()[name, num_rows]:
                assert not kernel.spills
                assert kernel.registers <= MAX_REGISTERS
                assert 2 * (kernel.shared_bytes + 1024) <= MAX_SHARED_BYTES

    @pytest.mark.parametrize("name", CASES)
    def test_loads_run_ahead_and_products_take_matrix_units(self, name: str):
        """
        Tiles come by asynchronous copies of 16 bytes; 16-bit products are Hopper's own, exact ones no tensor core's.
        """
        is_wide = CASES[name]["dtype"] == "float32"
        for num_rows in (1, 2048):
            product = compiled()[name, num_rows][0]
            assert "cp.async.cg.shared.global" in product.ptx
            assert ("wgmma.mma_async" in product.ptx) == (not is_wide)
            assert "tf32" not in product.ptx

    @pytest.mark.parametrize("name", CASES)
    def test_few_rows_take_a_second_launch_and_many_do_not(self, name: str):
        """
        Parts of few rows are merged by a kernel of their own, and chunks of any number.
        """
        both = ["linear_kernel", "merge_kernel"]
        assert both == [kernel.name for kernel in compiled()[name, 1]]
        has_chunks = "num_chunks" in CASES[name]
        alone = both * 2 if has_chunks else both[:1]  # 1024 rows of chunks at a time
        assert alone == [kernel.name for kernel in compiled()[name, 2048]]

    def test_number_of_rows_compiles_nothing_new(self):
        """
        Batches of 1, 16 and 33 rows run one pair of kernels.
        """
        launches = [compiled()[ODD, num_rows] for num_rows in (1, 16, 33)]
        for kernels in zip(*launches, strict=True):
            assert 1 == len({kernel.ptx for kernel in kernels})
