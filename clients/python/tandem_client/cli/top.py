"""`tandem top`: what a running server does, once a second."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from tandem_client.admin import AdminClient, Stats
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import readable_errors
from tandem_client.cli.top_rates import rates_between
from tandem_client.cli.top_table import table
from tandem_client.cli.waiting import Waits, no_answer

WINDOW_S = 5.0
"""Rates are of this many last seconds, or of one interval where that is longer."""


@readable_errors
def top(
    *,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, one interval apart, print, and exit.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """
    Watch what a running server does.

    Rates and latencies are means of the last five seconds, or of one interval if that is longer.
    With --json each look is one JSON object on a line of its own.
    """
    with AdminClient(address, retry=options.RETRY) as admin:
        with Waits(no_answer(address)):
            looks = Looks(admin.stats())
        console = Console()
        # A table that is drawn anew in its place needs a terminal; a file or pipe gets each look.
        if once or as_json or not console.is_terminal:
            _print_looks(admin, looks, interval_s, once=once, as_json=as_json)
            return
        with Live(table(looks.now, None, console.width), console=console) as live:
            while True:
                time.sleep(interval_s)
                looks.add(admin.stats())
                live.update(table(looks.now, looks.before, console.width))


class Looks:
    """Snapshots of the last seconds."""

    def __init__(self, first: Stats) -> None:
        self._kept = deque([first])

    @property
    def now(self) -> Stats:
        """The newest snapshot."""
        return self._kept[-1]

    @property
    def before(self) -> Stats | None:
        """The one that rates count from; None until there are two of the same server."""
        return self._kept[0] if len(self._kept) > 1 else None

    def add(self, stats: Stats) -> None:
        """Take a new snapshot, and forget what is too old or of a server that was restarted."""
        if stats.uptime_s < self.now.uptime_s:
            self._kept.clear()
        self._kept.append(stats)
        while len(self._kept) > 2 and stats.uptime_s - self._kept[1].uptime_s >= WINDOW_S:
            self._kept.popleft()


def _print_looks(
    admin: AdminClient, looks: Looks, interval_s: float, *, once: bool, as_json: bool
) -> None:
    while True:
        time.sleep(interval_s)
        looks.add(admin.stats())
        if as_json:
            rates = rates_between(looks.now, looks.before)
            content = dataclasses.asdict(looks.now) | {"rates": dataclasses.asdict(rates)}
            typer.echo(json.dumps(content))
        else:
            console = Console()
            console.print(table(looks.now, looks.before, console.width))
        if once:
            return
