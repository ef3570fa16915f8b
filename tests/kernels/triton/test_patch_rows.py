"""Triton's patch_rows against its definition."""

from __future__ import annotations

import pytest
import torch

from kernels.patch_rows import reference, triton_kernel


class TestPatchRows:
    @pytest.mark.parametrize("num_words", [0, 1, 255, 256, 1000])
    def test_matches_the_definition(self, num_words, device):
        """
        Patches of any size, holes included, change the words that the definition changes.
        """
        generator = torch.Generator().manual_seed(num_words)
        place = torch.randperm(1500, generator=generator)[:num_words].int()
        place[::3] = -1
        word = torch.randint(-(2**31), 2**31 - 1, (num_words,), generator=generator).int()
        patch = torch.stack((place, word)).to(device)
        expected, found = (torch.arange(1500, dtype=torch.int32, device=device) for _ in range(2))
        reference.patch_rows(expected, patch)
        triton_kernel.patch_rows(found, patch)
        assert torch.equal(expected, found)
