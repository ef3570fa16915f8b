"""Ways of a CPU to sample, as fixtures of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels import sampling
from kernels.cpu_extension import load_library


@pytest.fixture(scope="module")
def in_cpp() -> Iterator[None]:
    """Sample in C++."""
    load_library()
    sampling.use_cpu_extension(wanted=True)
    yield
    sampling.use_cpu_extension(wanted=False)


@pytest.fixture(scope="module", params=["torch", pytest.param("cpp", marks=pytest.mark.compiler)])
def each_way(request: pytest.FixtureRequest) -> None:
    """Sample with PyTorch, then in C++."""
    if request.param == "cpp":
        request.getfixturevalue("in_cpp")
