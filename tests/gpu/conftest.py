"""
Tests that run on the CPU everywhere, with few numbers, and on a CUDA device with many: `-m gpu`.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; asking for one that is not there is a failure and no skip."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("no CUDA device was found: these tests need one, leave out -m gpu")
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def scale(device: torch.device) -> int:
    """Return how many times more there is to do on a GPU."""
    return 16 if device.type == "cuda" else 1
