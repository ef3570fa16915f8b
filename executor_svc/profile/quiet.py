"""What the profiler's library prints by itself; free of PyTorch, which must be imported later."""

from __future__ import annotations

from collections.abc import MutableMapping


def silence_profiler(environ: MutableMapping[str, str]) -> None:
    """
    Unless told otherwise, keep the library under PyTorch's profiler from writing to our log.

    It prints lines of its own format at each start and stop; what went wrong, PyTorch raises.
    The library reads this when PyTorch is imported.
    """
    environ.setdefault("KINETO_LOG_LEVEL", "99")
