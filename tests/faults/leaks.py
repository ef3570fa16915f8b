"""Resources that idle processes hold: threads, file descriptors, children."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

SETTLE_S = 60.0
"""Longest time in seconds to close leftovers: gRPC keeps idle connections' threads for a while."""
MORE_THREADS = 4
"""Number of threads by which gRPC's own pools may grow, however long the storm."""
MORE_FILES = 4


@dataclass(frozen=True, slots=True)
class Holding:
    """Resources of one process."""

    threads: int
    files: int
    children: int

    def exceeds(self, before: Holding, more_threads: int) -> bool:
        """Return if this is more than before, by more than pools vary."""
        return (
            self.threads > before.threads + more_threads
            or self.files > before.files + MORE_FILES
            or self.children > before.children
        )


def holdings(processes: dict[str, psutil.Process]) -> dict[str, Holding]:
    """Return the resources of each process by role; processes that are just ending are left out."""
    found = {}
    for role, process in processes.items():
        try:
            found[role] = Holding(
                process.num_threads(), process.num_fds(), len(process.children(recursive=True))
            )
        except psutil.NoSuchProcess:
            continue
    return found


def find_leaks(
    before: dict[str, Holding],
    processes: dict[str, psutil.Process],
    settle_s: float = SETTLE_S,
    *,
    more_threads: int = MORE_THREADS,
) -> list[str]:
    """
    Return a line for each process that, once settled, holds more than that of its role did before.

    Args:
        before: What they held, by role.
        processes: The processes, by role.
        settle_s: Longest wait for leftovers to be closed.
        more_threads: Number of threads by which pools may grow.
    """
    end_s = time.monotonic() + settle_s
    while True:
        after = holdings(processes)
        grown = [
            f"{role} held {before[role]}, now {after[role]}"
            for role in after
            if role in before and after[role].exceeds(before[role], more_threads)
        ]
        if not grown or time.monotonic() > end_s:
            return grown
        time.sleep(0.2)
