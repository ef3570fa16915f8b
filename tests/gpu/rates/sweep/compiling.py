"""
The filter before timing: candidates are compiled for sm_90 by many processes, which also fills
Triton's cache, so that none is compiled while others are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tests.gpu.rates.sweep.points import Point, kernel_sizes
from tests.gpu.rates.sweep.tables import Key, Tuning
from tests.kernels.triton.compiled import (
    MAX_SHARED_BYTES,
    CompiledKernel,
    LaunchRequest,
    try_launches,
)

_AT_ONCE = 8
"""Most launches for which a process is started: starting takes as long as compiling several."""


Launches = list[list[CompiledKernel] | str]
"""Kernels of each launch of a candidate, or the compiler's message."""
Outcomes = dict[tuple[Key, Tuning], Launches]
"""Launches of the candidates of one process, by entry and tuning."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tuning for an entry, and the points whose launches are to be compiled."""

    key: Key
    tuning: Tuning
    points: tuple[Point, ...]


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
        self, points: Mapping[Key, Sequence[Point]], tunings: Mapping[Key, Sequence[Tuning]]
    ) -> dict[Key, list[Future[Outcomes]]]:
        """
        Begin to compile candidates of entries as they are launched at the entries' points, several
        in a process, of the next entry too where there are few; return the processes' outcomes by
        entry, in order.
        """
        groups: list[list[_Candidate]] = [[]]
        for key, each in tunings.items():
            distinct = tuple({kernel_sizes(point): point for point in points[key]}.values())
            for tuning in each:
                if sum(len(one.points) for one in groups[-1]) + len(distinct) > _AT_ONCE:
                    groups.append([])
                groups[-1].append(_Candidate(key, tuning, distinct))
        found: dict[Key, list[Future[Outcomes]]] = {key: [] for key in tunings}
        for group in filter(None, groups):
            future = self._pool.submit(self._compile, group)
            for key in dict.fromkeys(one.key for one in group):
                found[key].append(future)
        return found

    def close(self) -> None:
        """Forget what has not begun, and wait for what has."""
        self._pool.shutdown(cancel_futures=True)

    def _compile(self, candidates: Sequence[_Candidate]) -> Outcomes:
        requests = [
            LaunchRequest(
                call="tests.gpu.rates.sweep.work:launch",
                arguments={
                    "point": asdict(point),
                    "tuning": asdict(one.tuning),
                    "dtype": self._dtype,
                },
            )
            for one in candidates
            for point in one.points
        ]
        found = iter(try_launches(requests))
        return {(one.key, one.tuning): [next(found) for _ in one.points] for one in candidates}


def results(futures: Sequence[Future[Outcomes]], key: Key) -> Iterator[tuple[Tuning, Compiled]]:
    """Yield each candidate of an entry with its outcome, as processes end, in order."""
    for future in futures:
        for (entry, tuning), launches in future.result().items():
            if entry == key:
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
