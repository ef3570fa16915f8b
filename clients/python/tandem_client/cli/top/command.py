"""`tandem top`: a live table of a running server's statistics."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from tandem.errors import TandemError
from tandem_client.admin import AdminClient, Stats
from tandem_client.admin.executors import ExecutorSummary
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.executor_words import as_plain, executors_of
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.waiting import Waits, no_answer
from tandem_client.cli.top.rates import rates_between
from tandem_client.cli.top.view import Looks, View

LOOK_S = 10.0
"""Longest wait in seconds for one look at a server that stays silent; then the next one begins."""


@readable_errors
@takes_access
def top(
    *,
    channel: ChannelOptions,
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
    A server that stops answering is named, and looked at again when it is back.
    With --json each look is one JSON object on a line of its own.
    """
    with AdminClient(address, retry=options.RETRY, options=channel) as admin:
        with Waits(no_answer(address)):
            looks = Looks(*_look(admin))
        console = Console()
        # A table that is redrawn in place needs a terminal; a file or pipe gets each look in turn.
        if once or as_json or not console.is_terminal:
            _print_looks(admin, address, looks, interval_s, once=once, as_json=as_json)
            return
        _watch(admin, View(address, looks), console, interval_s)


def _watch(admin: AdminClient, view: View, console: Console, interval_s: float) -> None:
    """Take looks until interrupted, also while the server does not answer."""
    with Live(view, console=console):
        while True:
            time.sleep(interval_s)
            view.ask()
            try:
                seen = _look(admin, deadline_s=LOOK_S)
            except TandemError as error:
                view.failed(error)
            else:
                view.answered(*seen)


def _print_looks(
    admin: AdminClient,
    address: str,
    looks: Looks,
    interval_s: float,
    *,
    once: bool,
    as_json: bool,
) -> None:
    """Print each look below the previous one."""
    while True:
        time.sleep(interval_s)
        clock = time.strftime("%H:%M:%S")
        with Waits(f"waiting: {address} has not answered since {clock}; still asking"):
            looks.add(*_look(admin))
        if as_json:
            rates = rates_between(looks.now, looks.before)
            content = _by_name(looks.now) | {
                "rates": dataclasses.asdict(rates),
                "executors": [as_plain(one) for one in looks.executors],
            }
            typer.echo(json.dumps(content))
        else:
            console = Console()
            console.print(looks.as_table(console.width))
        if once:
            return


def _look(
    admin: AdminClient, deadline_s: float | None = None
) -> tuple[Stats, tuple[ExecutorSummary, ...]]:
    """Return a server's statistics and its executors."""
    return admin.stats(deadline_s=deadline_s), executors_of(admin, deadline_s)


def _by_name(stats: Stats) -> dict[str, Any]:
    """Return every field, with numbers as numbers, which protobuf's own JSON would quote."""
    values = {field.name: getattr(stats, field.name) for field in stats.DESCRIPTOR.fields}
    return values | {"refused_by_limit": dict(stats.refused_by_limit)}
