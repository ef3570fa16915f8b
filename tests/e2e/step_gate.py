"""
Gate for an executor's steps: tests hold the executor in the middle of its work as long as needed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

_NUMBER = struct.Struct("q")  # in native order, which is copied at once, not byte by byte
_ALLOWED, _BEGUN = 0, _NUMBER.size
_NO_LIMIT = 2**62
_LOOK_EVERY_S = 0.001


class StepGate:
    """
    Two numbers in a file that a test and its executors map: the number of steps that may begin,
    which the test writes, and the number that began, which the executor writes. Steps without rows
    always may.

    An executor that is held ends the steps that it began, sends their results, and is alive.
    """

    def __init__(self, file: Path) -> None:
        """
        Args:
            file: File of the gate; it is created, with the gate open, if it does not exist.
        """
        number = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        is_new = not os.fstat(number).st_size
        os.ftruncate(number, 2 * _NUMBER.size)
        self._memory = mmap.mmap(number, 2 * _NUMBER.size)
        os.close(number)
        if is_new:
            self.open()

    def open(self) -> None:
        """Let every step pass from now on."""
        self._write(_ALLOWED, _NO_LIMIT)

    def allow(self, num_steps: int) -> None:
        """
        Let so many steps begin after those that have begun, and at most one that is just beginning.
        """
        self._write(_ALLOWED, self._read(_BEGUN) + num_steps)

    def pass_through(self) -> None:
        """Wait, in the executor, until the next step may begin."""
        begun = self._read(_BEGUN)
        while begun >= self._read(_ALLOWED):
            time.sleep(_LOOK_EVERY_S)
        self._write(_BEGUN, begun + 1)

    def _read(self, at: int) -> int:
        return int(_NUMBER.unpack_from(self._memory, at)[0])

    def _write(self, at: int, number: int) -> None:
        _NUMBER.pack_into(self._memory, at, number)
