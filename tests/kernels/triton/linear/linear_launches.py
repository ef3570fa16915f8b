"""Calls of the product as a model makes them, for compiling."""

from __future__ import annotations

import torch

from kernels.linear.triton_kernel import linear


def launch_linear(
    *,
    num_rows: int,
    num_columns: int,
    width: int,
    dtype: str,
    biased: bool = False,
    adds: bool = False,
    num_chunks: int = 1,
    split: bool | None = None,
) -> None:
    """Launch a product of rows and a weight that is not read."""
    kind = getattr(torch, dtype)
    linear(
        torch.empty((num_rows, width), dtype=kind),
        torch.empty((num_columns, width), dtype=kind),
        torch.empty(num_columns, dtype=kind) if biased else None,
        torch.empty((num_rows, num_columns), dtype=kind) if adds else None,
        num_chunks,
        split=split,
    )
