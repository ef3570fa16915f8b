"""
The filter before timing: candidates are compiled for sm_90 by many processes, which also fills
Triton's cache, so that none is compiled while others are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tests.gpu.rates.sweep.points import Point, kernel_sizes
from tests.gpu.rates.sweep.tables import Tuning
from tests.kernels.triton.compiled import (
    MAX_SHARED_BYTES,
    CompiledKernel,
    LaunchRequest,
    try_launches,
)

_AT_ONCE = 8
"""Launches for which a process is started: starting takes as long as compiling several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """
    Outcome of compiling a candidate.

    Attributes:
        registers: Most registers of a thread in one of its kernels.
        shared_bytes: Most shared memory of a program.
        problem: Reason that it cannot be used; empty if it can.
    """

    registers: int = 0
    shared_bytes: int = 0
    problem: str = ""


class Compiling:
    """Processes that compile, at most so many at once."""

    def __init__(self, num_processes: int, dtype: str) -> None:
        self._pool = ThreadPoolExecutor(num_processes, thread_name_prefix="compiling")
        self._dtype = dtype

    def submit(
        self, points: Sequence[Point], tunings: Sequence[Tuning]
    ) -> list[Future[dict[Tuning, list[list[CompiledKernel] | str]]]]:
        """Begin to compile candidates as they are launched at some points."""
        distinct = {kernel_sizes(point): point for point in points}.values()
        per_process = max(1, _AT_ONCE // len(distinct))
        groups = [
            tunings[first : first + per_process] for first in range(0, len(tunings), per_process)
        ]
        return [self._pool.submit(self._compile, tuple(distinct), group) for group in groups]

    def close(self) -> None:
        """Forget what has not begun, and wait for what has."""
        self._pool.shutdown(cancel_futures=True)

    def _compile(
        self, points: Sequence[Point], tunings: Sequence[Tuning]
    ) -> dict[Tuning, list[list[CompiledKernel] | str]]:
        requests = [
            LaunchRequest(
                call="tests.gpu.rates.sweep.work:launch",
                arguments={
                    "point": asdict(point),
                    "tuning": asdict(tuning),
                    "dtype": self._dtype,
                },
            )
            for tuning in tunings
            for point in points
        ]
        found = iter(try_launches(requests))
        return {tuning: [next(found) for _ in points] for tuning in tunings}


def results(
    futures: Sequence[Future[dict[Tuning, list[list[CompiledKernel] | str]]]],
) -> Iterator[tuple[Tuning, Compiled]]:
    """Yield each candidate with its outcome, as processes end, in order."""
    for future in futures:
        for tuning, launches in future.result().items():
            yield tuning, judge(launches)


def judge(launches: Sequence[Sequence[CompiledKernel] | str]) -> Compiled:
    """Tell whether a candidate can be used, from what it takes at each point."""
    kernels: list[CompiledKernel] = []
    for each in launches:
        if isinstance(each, str):
            return Compiled(problem=each)
        kernels += each
    registers = max(kernel.registers for kernel in kernels)
    shared_bytes = max(kernel.shared_bytes for kernel in kernels)
    problem = ""
    if spilling := [kernel.name for kernel in kernels if kernel.spills]:
        problem = f"{spilling[0]} spills registers"
    elif shared_bytes + 1024 > MAX_SHARED_BYTES:
        problem = f"{shared_bytes} bytes of shared memory"
    return Compiled(registers=registers, shared_bytes=shared_bytes, problem=problem)
