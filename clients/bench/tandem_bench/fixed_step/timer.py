"""Precise waiting until a given time, with the interpreter's lock released."""

from __future__ import annotations

import ctypes
import time

_CLOCK_MONOTONIC = 1
_TIMER_ABSTIME = 1
_PR_SET_TIMERSLACK = 29
_NS_PER_S = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Timer:
    """
    Timer that sleeps on the thread that made it; Linux only.

    `clock_nanosleep` is called through ctypes, which releases the interpreter's lock, with an
    absolute time and a timer slack of 1 ns, which is a property of the thread.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._sleep = libc.clock_nanosleep
        self._sleep.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._until = _TimeSpec()
        self._address = ctypes.addressof(self._until)

    def wait_until(self, moment_ns: int) -> int:
        """Wait until monotonic time is `moment_ns`; return the time then, which may be later."""
        while (now_ns := time.monotonic_ns()) < moment_ns:
            self._until.tv_sec, self._until.tv_nsec = divmod(moment_ns, _NS_PER_S)
            self._sleep(_CLOCK_MONOTONIC, _TIMER_ABSTIME, self._address, None)
        return now_ns
