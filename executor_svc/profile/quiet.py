"""Silence for the profiler's library; free of PyTorch, which must be imported later."""

from __future__ import annotations

from collections.abc import MutableMapping


def silence_profiler(environ: MutableMapping[str, str]) -> None:
    """
    Keep the library under PyTorch's profiler (Kineto) from writing to our log, unless the
    environment says otherwise.

    It prints lines of its own format at each start and stop; PyTorch raises its errors. The library
    reads the variable when PyTorch is imported.
    """
    environ.setdefault("KINETO_LOG_LEVEL", "99")
