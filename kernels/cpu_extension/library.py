"""Loading of the library into a process: found or built when first needed."""

from __future__ import annotations

import ctypes
import threading
import time

import structlog
import torch

from kernels.cpu_extension.build import ExtensionUnavailable, built_library

__all__ = ["ExtensionUnavailable", "load_library"]

NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of number types in the library's functions."""

_log = structlog.get_logger(__name__)
_lock = threading.Lock()
_loaded: list[ctypes.CDLL] = []


def load_library() -> ctypes.CDLL:
    """
    Load the library of C++ kernels; compile it if this machine has not yet, which takes seconds.

    A process loads it once. A failure is not remembered: the next call tries again.

    Raises:
        ExtensionUnavailable: It cannot be built, or the built library cannot be loaded.
    """
    with _lock:
        if not _loaded:
            started = time.monotonic()
            path = built_library()
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise ExtensionUnavailable(f"{path} cannot be loaded: {error}") from error
            _loaded.append(library)
            seconds = round(time.monotonic() - started, 3)
            _log.info("cpu_extension_loaded", path=str(path), seconds=seconds)
        return _loaded[0]
