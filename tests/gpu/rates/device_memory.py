"""
`python -m tests.gpu.rates.device_memory`: the free memory of a CUDA device, a line each time that it changes, until the process is
ended; and `DeviceMemory`, which reads the lines of such a process.

A process of its own looks, so that what is measured is what the device has for others.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from tests.waiting import wait_until

_EVERY_S = 0.005
TOLERANCE_BYTES = 256 * 1024**2
"""Bytes by which a device's free memory differs for reasons of its driver."""


@dataclass(frozen=True, slots=True)
class Look:
    """Free bytes from a moment on, by CLOCK_MONOTONIC, which all processes share."""

    at_s: float
    free_bytes: int


def first_with(looks: Sequence[Look], free_bytes: int, *, since_s: float) -> Look | None:
    """Return the first look from `since_s` on at which so much was free; None if there is none."""
    return next(
        (look for look in looks if look.at_s >= since_s and look.free_bytes >= free_bytes), None
    )


class DeviceMemory:
    """
    Watcher of a device's free memory, in a process that lives as long as the block.

    Attributes:
        looks: Changes of the free memory until now, oldest first.
    """

    def __init__(self) -> None:
        self.looks: list[Look] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rates.device_memory"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: self.looks or self._process.poll() is not None, "a look at the memory")
        if not self.looks:
            raise SystemExit("the process that looks at the device's memory has ended")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def free_bytes(self) -> int:
        """Bytes that are free now."""
        return self.looks[-1].free_bytes

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at_s, free_bytes = line.split()
            self.looks.append(Look(float(at_s), int(free_bytes)))


def main() -> None:
    """Print until the process is ended."""
    last = None
    while True:
        free_bytes, _ = torch.cuda.mem_get_info()
        if free_bytes != last:
            sys.stdout.write(f"{time.monotonic()} {free_bytes}\n")
            sys.stdout.flush()
            last = free_bytes
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main()
