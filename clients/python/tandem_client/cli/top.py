"""`tandem top`: what a running server does, once a second."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tandem_client.admin import AdminClient, Stats
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import readable_errors


@readable_errors
def top(
    *,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """Watch a server's load; one JSON object per look with --json."""
    with AdminClient(address, retry=options.RETRY) as admin:
        if once or as_json:
            _print_looks(admin, interval_s, once=once, as_json=as_json)
            return
        stats = admin.stats()
        with Live(table(stats, None), console=Console()) as live:
            while True:
                time.sleep(interval_s)
                previous, stats = stats, admin.stats()
                live.update(table(stats, previous))


def table(now: Stats, before: Stats | None) -> Table:
    """
    A snapshot for people; rates count from `before`, or from the server's start.

    Args:
        now: The newest snapshot.
        before: An older one of the same server.
    """
    seconds = now.uptime_s - (before.uptime_s if before else 0.0)

    def rate(name: str) -> str:
        gained = getattr(now, name) - (getattr(before, name) if before else 0)
        return f"{gained / seconds:.1f}/s" if seconds > 0 else "-"

    state = "draining" if now.draining else "serving" if now.executor_attached else "no executor"
    used = now.used_blocks / now.total_blocks if now.total_blocks else 0.0
    rows = {
        "state": f"{state}, up {now.uptime_s:.0f} s",
        "requests": f"{now.running_requests} running, {now.waiting_requests} waiting",
        "blocks": f"{now.used_blocks}/{now.total_blocks} used ({used:.0%})",
        "output tokens": rate("output_tokens"),
        "prompt tokens": rate("prefill_tokens"),
        "steps": f"{rate('steps')}, {now.steps_in_flight} in flight",
        "finished": f"{now.finished_requests} ({rate('finished_requests')})",
        "failed, refused": f"{now.failed_requests}, {now.refused_requests}",
        "preemptions": str(now.preemptions),
    }
    grid = Table(show_header=False, box=None)
    for name, value in rows.items():
        grid.add_row(name, value)
    return grid


def _print_looks(admin: AdminClient, interval_s: float, *, once: bool, as_json: bool) -> None:
    while True:
        stats = admin.stats()
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(stats)))
        else:
            Console().print(table(stats, None))
        if once:
            return
        time.sleep(interval_s)
