"""Precision of a GPU's matrix products, which PyTorch keeps in switches of the whole process."""

from __future__ import annotations

import torch

from executor_svc.start_warnings import warn


def use_full_precision(device: torch.device) -> None:
    """
    Have cuBLAS multiply float32 as float32, and add up 16-bit products in float32 throughout; for a
    process of ours alone.

    By default PyTorch allows sums of 16 bits where a product is split, and an environment or a
    container's image may have turned on TF32, which keeps 10 bits of a float32.
    """
    if device.type != "cuda":
        return
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def warn_of_tf32(device: torch.device, dtype: torch.dtype) -> None:
    """Warn where the switches, which are the caller's in its process, round a float32 model."""
    if device.type != "cuda" or dtype != torch.float32:
        return
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        warn(
            "float32_is_rounded",
            "this process multiplies float32 in TF32 on GPUs, which keeps 10 bits: tokens may "
            "differ from those of an executor or a CPU; call "
            "torch.set_float32_matmul_precision('highest') before the engine is made, or unset "
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        )
