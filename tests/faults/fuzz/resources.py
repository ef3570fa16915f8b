"""Memory, threads and files of services before, during and after a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from executor_svc.server.call_places import NUM_LINK_THREADS, NUM_OTHER_THREADS
from tests.faults.fuzz.services import Services
from tests.faults.leaks import find_leaks, holdings

PERIOD_S = 1.0
SETTLE_S = 90.0
"""Longest wait for what is to be given back, seconds: idle connections are kept for a minute."""
POOL_THREADS = NUM_LINK_THREADS + NUM_OTHER_THREADS
"""Threads of an executor's pools, which begin as they are needed."""
MORE_MIB = 48.0
"""
Memory that a service may keep: allocators and caches, whatever the number of cases. Of 100,000
cases that each left half a kilobyte this would be passed.
"""


@dataclass(slots=True)
class Memory:
    """Resident memory of each service, MiB; `problems` says what was not given back."""

    before: Mapping[str, float]
    peak: dict[str, float]
    after: Mapping[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched(services: Services, settle_s: float = SETTLE_S) -> Iterator[Memory]:
    """Watch services during the block, then wait until they hold what they held before."""
    processes = services.processes()
    held = holdings(processes)
    found = Memory(services.memory_mib(), services.memory_mib())
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PERIOD_S):
            for name, now in services.memory_mib().items():
                found.peak[name] = max(found.peak[name], now)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
    gone = [name for name, process in processes.items() if not _is_alive(process)]
    found.problems += [f"{name} ended" for name in gone]
    found.problems += find_leaks(held, processes, settle_s, more_threads=POOL_THREADS)
    grown = _wait_for_memory(services, found.before, settle_s)
    found.after = services.memory_mib()
    found.problems += grown


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _wait_for_memory(services: Services, before: Mapping[str, float], settle_s: float) -> list[str]:
    end_s = time.monotonic() + settle_s
    while True:
        grown = [
            f"{name} keeps {now:.0f} MiB, had {before[name]:.0f}"
            for name, now in services.memory_mib().items()
            if now > before[name] + MORE_MIB
        ]
        if not grown or time.monotonic() > end_s:
            return grown
        time.sleep(1)
