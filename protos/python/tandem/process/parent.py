"""The bond of a process to the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """
    Have the kernel kill this process once the thread that started it is gone, whatever it does
    then. The parent may be gone already: compare `os.getppid()` afterwards. On a system other than
    Linux this does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
