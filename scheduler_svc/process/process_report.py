"""Report of one process of the service, for the metrics."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from scheduler_svc.ipc.snapshot import ProcessReport
from tandem.process.loaded_files import LOADED

_MEMORY = Path("/proc/self/statm")
"""Sizes of this process in pages, on Linux; the second one is the resident size."""


def process_report(
    name: str, *, open_streams: int = 0, failed_calls: Mapping[str, int] | None = None
) -> ProcessReport:
    """
    Return the report of this process.

    Args:
        name: Name of the process within the service.
        open_streams: Requests that have a client in this process now.
        failed_calls: Calls and items of calls that failed in it, by reason.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessReport(
        name=name,
        cpu_s=used.ru_utime + used.ru_stime,
        resident_bytes=_resident_bytes(),
        open_streams=open_streams,
        failed_calls=dict(failed_calls or {}),
        certificates=LOADED.expirations_s(),
        refused_files=LOADED.is_refused(),
    )


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system has no /proc."""
    try:
        num_pages = int(_MEMORY.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGESIZE")
