"""Chooses how the Triton kernels' tests run: interpreted wherever there is no CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.triton_mode import INTERPRETED, choose_triton_mode

choose_triton_mode()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of kernels: the CUDA device, or the CPU for the interpreter."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)


@pytest.fixture
def rows_alone_in_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Give a row of an interpreted `tl.dot` the same bits beside any others, as the device does.

    The interpreter asks numpy, and its BLAS may order a row's sums by the number of rows. Here each
    product and each sum is an operation on elements of its own, the sums in order.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter  # noqa: PLC0415  # after the conftest has chosen

    def create_dot(_self: Any, a: Any, b: Any, added: Any, *_how: Any) -> Any:
        kind = added.data.dtype
        left, right = a.data.astype(kind), b.data.astype(kind)
        total = np.zeros(added.data.shape, kind)
        for place in range(left.shape[-1]):
            total += left[..., :, place, None] * right[..., None, place, :]
        return interpreter.TensorHandle(total + added.data, added.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
