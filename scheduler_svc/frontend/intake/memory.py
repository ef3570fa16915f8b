"""Memory of large messages goes back to the system, which the C library's heap would keep."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

DELAY_S = 1.0
"""Seconds from the first large message until freed memory is given back, once for all of them."""
MMAP_THRESHOLD_BYTES = 1 << 20
"""Size from which a block of memory is mapped by itself, and given back when it is freed."""

NUM_HEAPS = 2
"""
Heaps of the C library, which would have eight for each core. Memory that is freed stays in pieces
in each: connections that come and go on gRPC's threads leave more of them than two heaps need.
"""

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def bound_heaps() -> None:
    """
    Keep glibc from raising its threshold with the first large block that is freed, and from making
    a heap for each thread; call it before threads begin.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, NUM_HEAPS)


class FreedMemory:
    """Freed memory of this process, given back to the system where the C library can (glibc)."""

    def __init__(self) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._is_due = False

    def give_back_soon(self) -> None:
        """Give freed memory back in a second; further calls until then do nothing."""
        if self._trim is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(DELAY_S, self._give_back, self._trim)

    def _give_back(self, trim: Callable[[int], int]) -> None:
        self._is_due = False
        # A refused call's error and the frames that it passed refer to each other, and hold the
        # message until they are collected.
        gc.collect()
        # On a thread, as it takes a while; ctypes lets others run meanwhile.
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
