"""Fresh tensors hold poison in all tests of kernels, so that an element that none writes is seen."""

from __future__ import annotations

import re

import pytest
import torch

from tests.architecture.test_sizes import ROOT
from tests.kernels.conftest import poison

UNSEEN = re.compile(r"\b(empty_strided|new_empty_strided|empty_permuted|resize_|torch\.Tensor\()")
"""Ways to make tensors of unknown contents that the fixture does not fill."""


class TestPoison:
    @pytest.mark.parametrize(
        "dtype",
        [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64],
        ids=str,
    )
    def test_fresh_tensors_are_poisoned(self, dtype: torch.dtype):
        """
        Tensors of every type that kernels write hold NaN, or the farthest integer, before the call.
        """
        fresh = torch.empty((2, 3), dtype=dtype)
        for tensor in (fresh, torch.empty_like(fresh), fresh.new_empty((2, 3))):
            expected = torch.full((2, 3), poison(dtype), dtype=dtype)
            assert torch.equal(expected.isnan(), tensor.isnan())
            assert dtype.is_floating_point or torch.equal(expected, tensor)
            assert dtype.is_floating_point == bool(tensor.isnan().all())

    def test_kernels_make_fresh_tensors_in_these_ways_only(self):
        """
        No kernel allocates its results past the functions that are poisoned.
        """
        paths = sorted((ROOT / "kernels").rglob("*.py"))
        assert paths
        assert [] == [str(path) for path in paths if UNSEEN.search(path.read_text())]
