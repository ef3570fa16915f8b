"""Features of this processor, as the system lists them."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""The features that Linux lists for each core; other systems have no such file."""


def cpu_has_any(*features: str) -> bool:
    """
    Tell whether the processor has one of these extensions, by their names in `/proc/cpuinfo`; False
    if there is no such file.
    """
    if not CPUINFO.is_file():
        return False
    found = set(CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    return not found.isdisjoint(features)
