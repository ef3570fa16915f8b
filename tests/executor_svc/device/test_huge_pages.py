"""Memory in huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_svc.device.huge_pages import HUGE_PAGE_BYTES, ask_for_huge_pages

SMAPS = Path("/proc/self/smaps")
KERNEL_HAS_THEM = Path("/sys/kernel/mm/transparent_hugepage").exists() and SMAPS.exists()


def flags_at(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address."""
    is_inside = False
    for line in SMAPS.read_text(encoding="ascii", errors="replace").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(bound, 16) for bound in words[0].split("-"))
            is_inside = first <= address < last
        elif is_inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


class TestAskForHugePages:
    @pytest.mark.skipif(not KERNEL_HAS_THEM, reason="a kernel without transparent huge pages")
    def test_whole_huge_pages_of_a_tensor_are_asked_for(self):
        """
        The kernel is asked to back a large tensor with huge pages, and the contents stay.
        """
        tensor = torch.ones(16 * HUGE_PAGE_BYTES, dtype=torch.uint8)
        ask_for_huge_pages(tensor)
        assert "hg" in flags_at(tensor.data_ptr() + tensor.nbytes // 2)
        assert bool((tensor == 1).all())

    @pytest.mark.parametrize("size", [0, 1, HUGE_PAGE_BYTES - 1])
    def test_small_tensor_is_left_as_it_is(self, size: int):
        """
        A tensor that holds no whole huge page is left alone.
        """
        tensor = torch.ones(size, dtype=torch.uint8)
        ask_for_huge_pages(tensor)
        assert size == int(tensor.sum())
