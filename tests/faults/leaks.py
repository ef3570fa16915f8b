"""What processes hold when nothing is going on: threads, file descriptors, children."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

SETTLE_S = 60.0
"""How long closing what is left over may take: gRPC keeps idle connections' threads for a while."""
MORE_THREADS = 4
"""gRPC's own pools grow and shrink by a few, however long the storm."""
MORE_FILES = 4


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds."""

    threads: int
    files: int
    children: int

    def exceeds(self, before: Holding) -> bool:
        """Whether it is more than before, by more than pools vary."""
        return (
            self.threads > before.threads + MORE_THREADS
            or self.files > before.files + MORE_FILES
            or self.children > before.children
        )


def holdings(processes: dict[str, psutil.Process]) -> dict[str, Holding]:
    """By role; processes that are just ending are left out."""
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
    before: dict[str, Holding], processes: dict[str, psutil.Process], settle_s: float = SETTLE_S
) -> list[str]:
    """What processes hold more than those of their role did before, once they have settled."""
    end_s = time.monotonic() + settle_s
    while True:
        after = holdings(processes)
        grown = [
            f"{role} held {before[role]}, now {after[role]}"
            for role in after
            if role in before and after[role].exceeds(before[role])
        ]
        if not grown or time.monotonic() > end_s:
            return grown
        time.sleep(0.2)
