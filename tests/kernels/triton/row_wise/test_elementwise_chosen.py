"""Kernels that a CUDA device gets for row-wise operations."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch, patch_rows, rms_norm, rope_kv_write, silu_mul  # noqa: F401  # they register


@pytest.mark.parametrize(
    "name", ["add_rms_norm", "patch_rows", "rms_norm", "rope_kv_write", "silu_mul"]
)
def test_cuda_gets_the_triton_kernel(name: str):
    """
    A CUDA device runs Triton's kernel of each row-wise operation, whether or not there is such a device now.
    """
    operation = dispatch._operations[name]
    chosen = operation.on(torch.device("cuda"))
    operation.forget()
    assert name == chosen.__name__
    assert chosen.__module__.endswith(".triton_kernel")
