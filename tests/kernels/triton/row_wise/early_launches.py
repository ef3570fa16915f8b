"""Calls of the kernels that can be launched early, for compiling."""

from __future__ import annotations

import torch

from kernels.early_launch import use_early_launches
from kernels.rms_norm.triton_kernel import add_rms_norm, rms_norm
from kernels.rope_kv_write.triton_kernel import rope_kv_write
from kernels.silu_mul.triton_kernel import silu_mul
from tests.kernels.triton.paged_attention.decode_launches import launch_decode


def launch_layer(*, on: bool) -> None:
    """Launch what a layer of decodes launches between its products, early or not."""
    use_early_launches(on=on)
    try:
        x, weight = (torch.empty(size, dtype=torch.bfloat16) for size in ((3, 2048), (2048,)))
        rms_norm(x, weight, 1e-5)
        add_rms_norm(x, torch.empty_like(x), weight, 1e-5)
        silu_mul(torch.empty((3, 4096), dtype=torch.bfloat16))
        rope_kv_write(
            torch.empty((3, 12 * 64), dtype=torch.bfloat16),
            torch.empty((3, 32, 2)),
            torch.empty(3, dtype=torch.int64),
            torch.empty((2, 16, 2, 2, 64), dtype=torch.bfloat16),
            qk_norm=None,
            norm_eps=1e-5,
        )
        for num_splits in (1, 2):
            launch_decode(head_dim=64, block_size=16, dtype="bfloat16", num_splits=num_splits)
    finally:
        use_early_launches(on=False)
