"""Reports of a frontend to the core, whose metrics are of the whole service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.ipc.snapshot import encode_json
from scheduler_svc.process.process_report import process_report
from tandem.errors import TandemError

REPORT_INTERVAL_S = 2.0
"""Seconds from one report to the next: the age that a frontend's numbers may have on the page."""


async def send_reports(core: CoreClient, index: int, failed_calls: Mapping[str, int]) -> None:
    """
    Report what this frontend counts, at once and then at regular intervals, until cancelled.

    Args:
        core: The core.
        index: Number of this frontend.
        failed_calls: Calls and items of calls that failed here, by reason; grows meanwhile.
    """
    name = f"frontend-{index}"
    while True:
        report = process_report(name, open_streams=len(core.streams), failed_calls=failed_calls)
        # A core that is late or gone is told by liveness, and the next report has it all.
        with contextlib.suppress(TandemError):
            await core.query("report", encode_json(report))
        await asyncio.sleep(REPORT_INTERVAL_S)
