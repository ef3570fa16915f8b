"""
The number of steps that an executor process computed, in memory that it shares with the tests.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_COUNT = struct.Struct("<q")


class StepCount:
    """One number in a file of its own, mapped so that neither end ever waits or writes a file."""

    def __init__(self, folder: Path, pid: int, *, create: bool = False) -> None:
        """
        Args:
            folder: Folder of the file.
            pid: Process that computes the steps.
            create: True in the executor, which makes the file and counts; the tests read.

        Raises:
            FileNotFoundError: That process has not computed a step yet.
        """
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        file = os.open(folder / f"steps-{pid}", flags, 0o600)
        if create:
            os.ftruncate(file, _COUNT.size)
        self._memory = mmap.mmap(file, _COUNT.size)
        os.close(file)

    def add(self) -> None:
        """Count one more."""
        _COUNT.pack_into(self._memory, 0, self.read() + 1)

    def read(self) -> int:
        """Return the number of steps so far."""
        return int(_COUNT.unpack_from(self._memory, 0)[0])
