"""Every kernel that is launched on a GPU is compiled by a test."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

COMPILED_BY = {
    "decode_rows._gather_rows_kernel": "row_wise/test_elementwise_compiled.py",
    "decode_rows._advance_rows_kernel": "row_wise/test_elementwise_compiled.py",
    "linear.linear_kernel": "linear/test_linear_compiled.py",
    "linear.merge_kernel": "linear/test_linear_compiled.py",
    "paged_attention.decode_kernel": "paged_attention/test_decode_compiled.py",
    "paged_attention.merge_kernel": "paged_attention/test_decode_compiled.py",
    "paged_attention.prefill_kernel": "paged_attention/test_prefill_compiled.py",
    "patch_rows._patch_rows_kernel": "row_wise/test_elementwise_compiled.py",
    "rms_norm._rms_norm_kernel": "row_wise/test_elementwise_compiled.py",
    "rope_kv_write._rope_kv_write_kernel": "row_wise/test_elementwise_compiled.py",
    "silu_mul._silu_mul_kernel": "row_wise/test_elementwise_compiled.py",
    **dict.fromkeys(
        (
            "sampling._best_kernel",
            "sampling._bias_kernel",
            "sampling._choose_kernel",
            "sampling._collect_kernel",
            "sampling._count_kernel",
            "sampling._draw_kernel",
            "sampling._greedy_kernel",
            "sampling._merge_kernel",
            "sampling._part_kernel",
            "sampling._penalise_kernel",
            "sampling._search_kernel",
            "sampling._weigh_kernel",
        ),
        "sampling/test_sampling_compiled.py",
    ),
}
"""Each kernel that is launched, by its operation and name, and the test that holds what it takes to limits."""


def launched_kernels() -> set[str]:
    """Functions of `kernels/` that a launch names: `name[grid](...)`."""
    found = set()
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value).rpartition(".")[2]
                if name.endswith("_kernel"):
                    found.add(f"{path.relative_to(ROOT / 'kernels').parts[0]}.{name}")
    return found


class TestCoverage:
    def test_every_launched_kernel_is_compiled_by_a_test(self):
        """
        Registers, spills, shared memory and instructions of each kernel are looked at by the test named beside it.
        """
        assert set(COMPILED_BY) == launched_kernels()

    def test_the_tests_are_there(self):
        """
        Each test that is named compiles for sm_90.
        """
        for name in set(COMPILED_BY.values()):
            text = (Path(__file__).parent / name).read_text()
            assert "compile_launches(" in text or "compile_kernels(" in text, name
