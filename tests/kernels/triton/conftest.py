"""Chooses how the Triton kernels' tests run: interpreted wherever there is no CUDA device."""

from __future__ import annotations

import os
import sys

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a function is decorated, triton's own too
    before = sys.modules.get("triton")
    if before is not None and not before.knobs.runtime.interpret:
        raise pytest.UsageError(
            "triton was imported before TRITON_INTERPRET was set: give pytest tests/kernels first, "
            "or set TRITON_INTERPRET=1"
        )
    import triton  # noqa: F401  # before anything else imports it in another mode


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the CUDA device, or the CPU for the interpreter."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
