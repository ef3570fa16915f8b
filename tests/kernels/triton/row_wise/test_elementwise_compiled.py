"""
Resources that row-wise kernels take on sm_90, for the sizes of the models we compare ourselves
with.
"""

from __future__ import annotations

import functools
import re

import pytest

from kernels.decode_rows import triton_kernel as rows_triton
from kernels.patch_rows import triton_kernel as patch_triton
from kernels.rms_norm import triton_kernel as norm_triton
from kernels.rope_kv_write import triton_kernel as rope_triton
from kernels.silu_mul import triton_kernel as gate_triton
from tests.kernels.triton.compiled import CompiledKernel, KernelRequest, compile_kernels


def norm_request(width: int, dtype: str, *, adds: bool) -> KernelRequest:
    tile, num_warps = norm_triton.launch_shape(width)
    return KernelRequest(
        kernel="kernels.rms_norm.triton_kernel:_rms_norm_kernel",
        types=dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}") | {"eps": "fp32"},
        constexprs={
            "X_STRIDE": width,
            "RESIDUAL_STRIDE": width if adds else 0,
            "WIDTH": width,
            "TILE": tile,
            "ADDS": adds,
            "EARLY": False,
        },
        num_warps=num_warps,
    )


def gate_request(width: int, dtype: str) -> KernelRequest:
    return KernelRequest(
        kernel="kernels.silu_mul.triton_kernel:_silu_mul_kernel",
        types={"gate_up": f"*{dtype}", "out": f"*{dtype}"},
        constexprs={
            "ROW_STRIDE": 2 * width,
            "WIDTH": width,
            "TILE": gate_triton.TILE,
            "EARLY": False,
        },
        num_warps=gate_triton.NUM_WARPS,
    )


def rope_request(
    heads: int, kv_heads: int, head_dim: int, dtype: str, *, norms: bool
) -> KernelRequest:
    dim_tile, num_warps = rope_triton.launch_shape(head_dim)
    return KernelRequest(
        kernel="kernels.rope_kv_write.triton_kernel:_rope_kv_write_kernel",
        types=dict.fromkeys(("qkv", "qk_norm", "query", "kv_cache"), f"*{dtype}")
        | {"rotation": "*fp32", "kv_position": "*i64", "norm_eps": "fp32"},
        constexprs={
            "ROW_STRIDE": (heads + 2 * kv_heads) * head_dim,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": head_dim,
            "DIM_TILE": dim_tile,
            "HEAD_TILE": rope_triton.HEADS_PER_PROGRAM,
            "NORMS": norms,
            "EARLY": False,
        },
        num_warps=num_warps,
    )


PATCH = KernelRequest(
    kernel="kernels.patch_rows.triton_kernel:_patch_rows_kernel",
    types={"words": "*i32", "patch": "*i32", "num_words": "i32"},
    constexprs={"TILE": patch_triton.TILE},
    num_warps=patch_triton.NUM_WARPS,
)

_ROW_TYPES = {
    "position": "*i64",
    "temperature": "*fp32",
    "top_k": "*i32",
    "top_p": "*fp32",
    "seed": "*i64",
    "choice": "*i64",
    "min_p": "*fp32",
}
_SLOT_TYPES = {f"slot_{name}": kind for name, kind in _ROW_TYPES.items()} | {
    "slot_position": "*i32"
}

GATHER_ROWS = KernelRequest(
    kernel="kernels.decode_rows.triton_kernel:_gather_rows_kernel",
    types=dict.fromkeys(("slot", "slot_table", "history", "token_id", "seq_len", "table"), "*i32")
    | {"kv_position": "*i64", "drawn_position": "*i64", "line": "*i32"}
    | _ROW_TYPES
    | _SLOT_TYPES,
    constexprs={
        "BLOCKS": 4096,
        "HISTORY": 131073,
        "BLOCK": 32,
        "LINES": 8,
        "TILE": rows_triton.TABLE_TILE,
    },
    num_warps=rows_triton.NUM_WARPS,
)

ADVANCE_ROWS = KernelRequest(
    kernel="kernels.decode_rows.triton_kernel:_advance_rows_kernel",
    types=dict.fromkeys(("slot", "slot_position", "history", "ring", "line"), "*i32")
    | {"position": "*i64", "token": "*i64", "valid": "*i1", "num_rows": "i32"},
    constexprs={"HISTORY": 131073, "WIDTH": 256, "TILE": rows_triton.ROW_TILE},
    num_warps=rows_triton.NUM_WARPS,
)

SCATTERED = {"patch": (PATCH, 40), "gather-rows": (GATHER_ROWS, 64), "advance": (ADVANCE_ROWS, 40)}
"""Kernels that touch single words, whatever their place."""

CASES = {
    "norm-1024-bf16": (norm_request(1024, "bf16", adds=False), 40),
    "add-norm-2048-bf16": (norm_request(2048, "bf16", adds=True), 48),
    "add-norm-4096-bf16": (norm_request(4096, "bf16", adds=True), 48),
    "add-norm-32768-fp32": (norm_request(32768, "fp32", adds=True), 136),
    "gate-14336-bf16": (gate_request(14336, "bf16"), 48),
    "gate-8192-fp32": (gate_request(8192, "fp32"), 48),
    "rope-32-8-64-bf16": (rope_request(32, 8, 64, "bf16", norms=False), 48),
    "rope-32-8-80-fp16": (rope_request(32, 8, 80, "fp16", norms=True), 48),
    "rope-32-8-96-fp32": (rope_request(32, 8, 96, "fp32", norms=True), 48),
    "rope-32-8-128-bf16": (rope_request(32, 8, 128, "bf16", norms=False), 48),
    "rope-16-8-128-normed-bf16": (rope_request(16, 8, 128, "bf16", norms=True), 48),
    "rope-8-4-256-normed-bf16": (rope_request(8, 4, 256, "bf16", norms=True), 48),
    **SCATTERED,
}
"""A kernel and the most registers it may take, by name."""


@functools.cache
def compiled() -> dict[str, CompiledKernel]:
    """All cases, compiled by one process."""
    requests = [request for request, _ in CASES.values()]
    return dict(zip(CASES, compile_kernels(requests), strict=True))


@pytest.mark.slow
class TestResources:
    @pytest.mark.parametrize("name", CASES)
    def test_registers_suffice(self, name: str):
        """
        No kernel spills, and each leaves room for many programs on a multiprocessor.
        """
        found, (_, most) = compiled()[name], CASES[name]
        assert not found.spills
        assert found.registers <= most
        assert found.shared_bytes <= 8 * 1024

    @pytest.mark.parametrize("name", [name for name in CASES if name not in SCATTERED])
    def test_rows_are_read_16_bytes_at_a_time(self, name: str):
        """
        Threads read and write rows in the widest pieces there are, and write nothing in smaller ones.
        """
        ptx = compiled()[name].ptx
        assert "ld.global.v4.b32" in ptx
        assert {"v4.b32"} == set(re.findall(r"st\.global\.(\S+)", ptx))
