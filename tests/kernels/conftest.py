"""Settings shared by the kernels' tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.threads import NUM_THREADS

torch.set_num_threads(NUM_THREADS)  # also where torch was imported before the variable was set


@pytest.fixture(autouse=True)
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Fill every fresh floating tensor with NaN, so that elements never written are seen.
    """
    plain_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = plain_empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)
