"""
Resources that the sampler's kernels take on sm_90, for the vocabularies of the models we serve.
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.triton.compiled import (
    MAX_SHARED_BYTES,
    CompiledKernel,
    LaunchRequest,
    compile_launches,
)

DRAWN = [(1, 151936, "bfloat16"), (64, 128256, "bfloat16"), (256, 49152, "float32")]

REGISTERS = {
    "_best_kernel": 48,
    "_greedy_kernel": 32,
    "_weigh_kernel": 144,
    "_collect_kernel": 80,
    "_search_kernel": 192,
    "_draw_kernel": 80,
    "_choose_kernel": 32,
    "_bias_kernel": 64,
    "_count_kernel": 64,
    "_penalise_kernel": 64,
    "_part_kernel": 96,
    "_merge_kernel": 40,
}
"""Most registers that a thread may take; from what it took, with room for another compiler."""


@pytest.fixture(scope="module")
def launches() -> list[list[CompiledKernel]]:
    scenes = "tests.kernels.triton.sampling.sampling_launches"
    draws = [
        LaunchRequest(
            call=f"{scenes}:launch_draw",
            arguments={"num_rows": rows, "vocab_size": vocab_size, "dtype": dtype},
        )
        for rows, vocab_size, dtype in DRAWN
    ]
    edits = LaunchRequest(
        call=f"{scenes}:launch_edits", arguments={"vocab_size": 151936, "dtype": "bfloat16"}
    )
    return compile_launches([*draws, edits])


@pytest.mark.slow
class TestCompiled:
    def test_every_kernel_fits_the_device(self, launches):
        """
        Each kernel that the sampler launches compiles for sm_90 without spills, within its registers and with little shared memory.
        """
        kernels = [kernel for launch in launches for kernel in launch]
        assert set(REGISTERS) == {kernel.name for kernel in kernels}
        for kernel in kernels:
            assert not kernel.spills, kernel.name
            assert kernel.registers <= REGISTERS[kernel.name], kernel.name
            assert kernel.shared_bytes <= MAX_SHARED_BYTES // 4, kernel.name

    def test_columns_may_lie_anywhere(self, launches):
        """
        Columns at addresses that are no multiple of 16 bytes run the same code.
        """
        rows, vocab_size, dtype = DRAWN[0]
        request = LaunchRequest(
            call="tests.kernels.triton.sampling.sampling_launches:launch_draw",
            arguments={
                "num_rows": rows,
                "vocab_size": vocab_size,
                "dtype": dtype,
                "first_row": 1,
            },
        )
        (launched,) = compile_launches([request])
        assert [kernel.ptx for kernel in launches[0]] == [kernel.ptx for kernel in launched]

    def test_logits_are_read_four_words_at_a_time(self, launches):
        """
        Kernels that stream logits load 16 bytes per thread.
        """
        streaming = {"_best_kernel", "_draw_kernel", "_weigh_kernel", "_collect_kernel"}
        for kernel in launches[0]:
            if kernel.name in streaming:
                assert "ld.global.v4" in kernel.ptx, kernel.name

    def test_arithmetic_is_not_the_approximate_kind(self, launches):
        """
        The division by the temperature rounds as the CPU's does, and logarithms are right next to 1: `lg2.approx` would bend the tail of the noise.
        """
        (kernel,) = (kernel for kernel in launches[0] if kernel.name == "_draw_kernel")
        assert "div.rn.f32" in kernel.ptx
        assert "lg2.approx" not in kernel.ptx
        assert "div.full" not in kernel.ptx

    def test_penalties_are_rounded_one_by_one(self, launches):
        """
        No multiplication of a penalty is fused with the subtraction behind it.
        """
        (kernel,) = (kernel for kernel in launches[-1] if kernel.name == "_penalise_kernel")
        assert "mul.rn.f32" in kernel.ptx or "mul.f32" in kernel.ptx
        assert not re.search(r"\bfma\.rn\.f32", kernel.ptx)
