"""Memory that can still be allocated on a device, and the host's memory within its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """
    Return the bytes that can still be allocated: the device's free memory, or the host's within its
    cgroup; None if unknown.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [value for value in (_meminfo_available(), _cgroup_left()) if value is not None]
    return min(limits, default=None)


def host_limit_bytes() -> int:
    """Return the bytes of memory the host has, or its cgroup allows if that is less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup = _cgroup()
    return installed if cgroup is None else min(installed, cgroup[0])


def _meminfo_available() -> int | None:
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_left() -> int | None:
    cgroup = _cgroup()
    return None if cgroup is None else max(0, cgroup[0] - cgroup[1])


def _cgroup() -> tuple[int, int] | None:
    """
    Return limit and use of cgroup version 2, else of version 1; None without a limit.

    Inactive cached pages of files do not count as used, because the kernel drops them before an
    allocation fails: otherwise the model files just read would count twice.
    """
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (_CGROUP / limit).is_file() or not (_CGROUP / used).is_file():
            continue
        text = (_CGROUP / limit).read_text(encoding="ascii").strip()
        if text == "max":
            return None
        taken = int((_CGROUP / used).read_text(encoding="ascii"))
        return int(text), max(0, taken - _cgroup_stat((_CGROUP / limit).parent, inactive))
    return None


def _cgroup_stat(folder: Path, name: str) -> int:
    stat = folder / "memory.stat"
    if not stat.is_file():
        return 0
    for line in stat.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0
