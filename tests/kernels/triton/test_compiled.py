"""The compiler's process: what it reports of a kernel, and that it is no interpreter."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from tests.kernels.triton.compiled import KernelRequest, compile_kernel


@triton.jit
def doubled(source, target, count, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(source + at, mask=at < count, other=0.0)
    tl.store(target + at, value * 2, mask=at < count)


@pytest.mark.slow
class TestCompiled:
    def test_kernel_is_compiled_for_hopper_without_a_device(self):
        """
        A kernel becomes sm_90 code with its registers, memory and PTX, on a machine without a GPU.
        """
        request = KernelRequest(
            kernel="tests.kernels.triton.test_compiled:doubled",
            types={"source": "*fp16", "target": "*fp16", "count": "i32"},
            constexprs={"TILE": 1024},
            divisible=["count"],
        )
        found = compile_kernel(request)
        assert ".target sm_90a" in found.ptx
        assert 8 <= found.registers <= 64
        assert not found.spills
        assert 0 == found.shared_bytes

    def test_misspelt_argument_is_an_error(self):
        """
        Arguments that the kernel does not have, or that were given no type, are named.
        """
        request = KernelRequest(
            kernel="tests.kernels.triton.test_compiled:doubled",
            types={"source": "*fp16", "target": "*fp16", "counts": "i32"},
            constexprs={"TILE": 1024},
        )
        with pytest.raises(AssertionError, match=r"missing or unknown: \['count', 'counts'\]"):
            compile_kernel(request)
