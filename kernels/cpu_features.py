"""Features of this processor, as the system lists them."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_has_any(*features: str) -> bool:
    """
    Tell whether the processor has one of these extensions, by their names in `/proc/cpuinfo`; False
    if there is no such file.
    """
    if not _CPUINFO.is_file():
        return False
    found = set(_CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    return not found.isdisjoint(features)
