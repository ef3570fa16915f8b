"""Settings shared by the kernels' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.threads import NUM_THREADS

torch.set_num_threads(NUM_THREADS)  # also where torch was imported before the variable was set


def poison(dtype: torch.dtype) -> float | bool:
    """Return a value that no kernel may mean: NaN, or the farthest integer from any index."""
    if dtype.is_floating_point:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min if dtype.is_signed else limits.max


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every fresh tensor with poison, so that an element that nothing writes is seen."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(poison(tensor.dtype))

        return made

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
