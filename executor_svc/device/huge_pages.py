"""Memory of the CPU in pages of 2 MiB, where the kernel has them."""

from __future__ import annotations

import ctypes
import functools
import mmap

from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""
Size of a huge page on x86, and on ARM with pages of 4 KiB; where pages have another size the kernel
uses what fits.
"""


def ask_for_huge_pages(tensor: Tensor) -> None:
    """
    Ask the kernel to back a tensor with huge pages, which it does as they are first touched.

    Weights and KV are gigabytes that each step reads once: in pages of 4 KiB the processor looks up
    addresses as often as it reads, and a virtual machine doubles that cost. By default Linux gives
    huge pages only to programs that ask (`transparent_hugepage` is `madvise`). A kernel that
    refuses gives small pages, as before; nothing else depends on it.

    Args:
        tensor: Tensor on any device; only whole pages of a tensor on the CPU are asked for.
    """
    if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = tensor.data_ptr()
    first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (begin + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if last > first:
        _library().madvise(first, last - first, mmap.MADV_HUGEPAGE)


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the C library of this process."""
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.madvise.restype = ctypes.c_int
    return library
