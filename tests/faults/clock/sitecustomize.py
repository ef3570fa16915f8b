"""
A wall clock that tests can set, for a service started with this folder on its PYTHONPATH.

$FAULTS_CLOCK names a file of 8 bytes: seconds (a little-endian double) to add to the time of day.
The shift applies to our services, the standard library and other packages. gRPC gets the real time,
because it compares times of Python with the clock of its own C core, which cannot be shifted for
one process. Monotonic time is never touched.
"""

from __future__ import annotations

import datetime as dt
import mmap
import os
import struct
import sys
import time
from pathlib import Path

_real_time, _real_time_ns, _RealDatetime = time.time, time.time_ns, dt.datetime


def _map_offset() -> mmap.mmap | None:
    path = os.environ.get("FAULTS_CLOCK")
    if path is None:
        return None
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)


_memory = _map_offset()


def _offset_s() -> float:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if _memory is None or caller.startswith("grpc"):
        return 0.0
    return struct.unpack_from("<d", _memory, 0)[0]


def _time() -> float:
    return _real_time() + _offset_s()


def _time_ns() -> int:
    return _real_time_ns() + int(_offset_s() * 1e9)


class _Datetime(_RealDatetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
        return _RealDatetime.now(tz) + dt.timedelta(seconds=_offset_s())


if _memory is not None:
    time.time, time.time_ns, dt.datetime = _time, _time_ns, _Datetime
