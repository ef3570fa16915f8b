"""Settings and tiny models shared by the executor's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.model_zoo import FAMILIES

torch.set_num_threads(
    1
)  # the tests' products are tiny; waking threads on a busy machine costs seconds


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model by its builder's name, built once per session."""
    built: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in built:
            built[name] = FAMILIES[name](tmp_path_factory.mktemp(name))
        return built[name]

    return directory
