"""Features of this processor, as the system lists them."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""The features that Linux lists for each core; other systems have no such file."""
_VECTORS = ("avx", "amx", "fma", "asimd", "sve")
"""Beginnings of the names of features with vectors or matrices."""


def cpu_has_any(*features: str) -> bool:
    """
    Tell whether the processor has one of these extensions, by their names in `/proc/cpuinfo`; False
    if there is no such file.
    """
    if not CPUINFO.is_file():
        return False
    found = set(CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    return not found.isdisjoint(features)


def vector_features() -> str:
    """
    Return the processor's extensions of numbers side by side, in alphabetical order; those decide
    in which order our C++ kernels and PyTorch's sum. Empty if there is no `/proc/cpuinfo`.
    """
    if not CPUINFO.is_file():
        return ""
    found = set(CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    return " ".join(sorted(one for one in found if one.startswith(_VECTORS)))
