"""Scheduler service that the benchmark of streams measures, and the usage of its processes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tandem_bench.link.processes import FixedStepExecutor, SchedulerService, cpu_ns
from tandem_bench.stream.certificate import SelfMadeCertificate

STALL_DEADLINE_S = 3.0
"""
Stall deadline of the service where clients stop reading on purpose. Otherwise its default holds: a
client that is late then lacks CPU, and is no slow consumer.
"""
_PAGE_BYTES = 4096
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """
    Resources that the service has used so far.

    Attributes:
        core_cpu_ns: CPU time of the core process, nanoseconds.
        frontend_cpu_ns: CPU time of all frontends, nanoseconds.
        frontend_mib: Resident memory of all frontends now, MiB.
    """

    core_cpu_ns: int
    frontend_cpu_ns: int
    frontend_mib: float


class StreamService(SchedulerService):
    """Whole scheduler service with its frontends."""

    def __init__(
        self,
        executor: FixedStepExecutor,
        streams: int,
        frontends: int,
        directory: Path,
        *,
        is_to_stall: bool = False,
        certificate: SelfMadeCertificate | None = None,
    ) -> None:
        """
        Start the service and wait until it listens.

        Args:
            executor: Executor that it uses.
            streams: Most requests in the system.
            frontends: Number of frontend processes.
            directory: Directory for the ready file.
            is_to_stall: Clients will stop reading, so the stall deadline is short.
            certificate: Certificate of the public port; None = plain text.

        Raises:
            BenchFailed: It ended, or did not listen in time.
        """
        super().__init__(
            executor,
            directory,
            f"--max-num-seqs={streams}",
            f"--frontends={frontends}",
            *([f"--stall-deadline-s={STALL_DEADLINE_S}"] if is_to_stall else []),
            *([] if certificate is None else certificate.options),
        )
        self._frontends = _children(self.pid)

    def usage(self) -> Usage:
        """Read the usage of core and frontends until now."""
        return Usage(
            core_cpu_ns=cpu_ns(self.pid),
            frontend_cpu_ns=sum(map(cpu_ns, self._frontends)),
            frontend_mib=sum(map(_memory_bytes, self._frontends)) / _MIB,
        )


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def _memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
