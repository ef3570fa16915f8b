"""Settings shared by the kernels' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.threads import NUM_THREADS

torch.set_num_threads(NUM_THREADS)  # also where torch was imported before the variable was set


@pytest.fixture(autouse=True)
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every fresh floating tensor with NaN, so that an element that nothing writes is seen."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
