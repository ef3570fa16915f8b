"""
Measurements of a device's memory and of what work on it needs: CUDA's own figures, or the host's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from executor_svc.device.free_memory import available_bytes, host_limit_bytes

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """
    A device's memory at one moment, in bytes.

    Attributes:
        total: All memory of the device.
        free: Memory that could be allocated now.
        used: Memory that grows when we load and compute: on CUDA everything in use there, on the
            host this process's resident memory.
    """

    total: int
    free: int
    used: int


class MemoryMeter(Protocol):
    """Source of memory figures; tests bring their own."""

    def read(self) -> Reading:
        """Measure now."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Do the work and return the most bytes it needed beyond those in use before."""


def meter_of(device: torch.device) -> MemoryMeter:
    """Return the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(device)


class CudaMeter:
    """Figures of the driver and of PyTorch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        """Measure; memory that PyTorch only caches counts as free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return Reading(total=total, free=free, used=total - free)

    def peak_of(self, work: Callable[[], None]) -> int:
        """
        Return the growth of the allocator's peak; memory that libraries allocate on their own shows
        in `read` instead.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


class HostMeter:
    """The machine's memory within its container's limits, and this process's resident size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        """Measure; without figures of the system all memory counts as free."""
        total = host_limit_bytes()
        free = available_bytes(self._device)
        return Reading(total=total, free=total if free is None else min(free, total), used=_rss())

    def peak_of(self, work: Callable[[], None]) -> int:
        """
        Return the growth of the resident peak.

        If the system cannot reset the peak, the highest since the process began is used instead:
        the result is too small if an earlier peak was higher.
        """
        can_reset = _reset_peak()
        before = _rss() if can_reset else _peak()
        work()
        return max(0, _peak() - before)


class SharedMeter:
    """One process's part of a memory that several processes of one executor use alike."""

    def __init__(self, whole: MemoryMeter, num_processes: int) -> None:
        self._whole = whole
        self._num_processes = num_processes

    def read(self) -> Reading:
        """Measure: total and free memory are divided, used memory is this process's own."""
        whole = self._whole.read()
        return Reading(
            total=whole.total // self._num_processes,
            free=whole.free // self._num_processes,
            used=whole.used,
        )

    def peak_of(self, work: Callable[[], None]) -> int:
        """Return the growth of this process's peak."""
        return self._whole.peak_of(work)


def _reset_peak() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _rss() -> int:
    return _status("VmRSS") or _peak()


def _peak() -> int:
    found = _status("VmHWM")
    if found is not None:
        return found
    kib_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib_or_bytes * (1 if os.uname().sysname == "Darwin" else 1024)


def _status(name: str) -> int | None:
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
