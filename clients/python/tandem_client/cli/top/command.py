"""`tandem top`: a live table of a running server's statistics."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from tandem.errors import TandemError
from tandem_client.admin import AdminClient
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.stop_signals import stop_signals
from tandem_client.cli.shared.waiting import Waits, no_answer
from tandem_client.cli.top.controls import Controls
from tandem_client.cli.top.keys import Keyboard
from tandem_client.cli.top.table import table
from tandem_client.cli.top.view import View
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import as_plain, view_of
from tandem_client.views.snapshot import Snapshot, take_snapshot

ANSWER_S = 10.0
"""Longest wait in seconds for a snapshot of a silent server; then the next one begins."""
KEY_S = 0.05
"""Longest wait in seconds for a key before snapshots are seen to."""


@readable_errors
@takes_access
def top(
    *,
    channel: ChannelOptions,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between snapshots.")] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Take two snapshots, one interval apart, print, and exit."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """
    Watch what a running server does.

    Rates and latencies are means of the last five seconds, or of one interval if that is longer.
    TTFT and ITL have the percentiles of each interval, requests those that run before those that
    wait. A server that stops answering is named, and polled until it is back.
    On a terminal q leaves, p pauses, s sorts requests, arrows scroll them, and ? lists the keys.
    With --json each snapshot is one JSON object on a line of its own.
    """
    with AdminClient(address, retry=options.RETRY, options=channel) as admin:
        with Waits(no_answer(address)):
            history = SnapshotHistory(take_snapshot(admin), interval_s)
        console = Console()
        # A table that is redrawn in place needs a terminal; a file or pipe gets all in turn.
        if once or as_json or not console.is_terminal:
            _print_snapshots(admin, address, history, interval_s, once=once, as_json=as_json)
            return
        _watch(admin, address, history, console, interval_s)


def _watch(
    admin: AdminClient,
    address: str,
    history: SnapshotHistory,
    console: Console,
    interval_s: float,
) -> None:
    """
    Take snapshots until a key or a signal ends it, also while the server does not answer. A thread
    takes them, so that a key is obeyed at once; closing the connection ends the last one.
    """
    poller = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
    snapshot: Future[Snapshot] | None = None
    try:
        with stop_signals(), Keyboard() as keyboard:
            controls = Controls() if keyboard.is_terminal else None
            view = View(address, history, controls=controls)
            next_s = time.monotonic() + interval_s
            live = Live(view, console=console)
            try:
                live.start(refresh=True)  # a signal may come in it, so that it is in the block
                while controls is None or not controls.is_leaving:
                    now_s = time.monotonic()
                    if snapshot is None and now_s >= next_s:
                        view.ask()
                        snapshot = poller.submit(take_snapshot, admin, deadline_s=ANSWER_S)
                    elif snapshot is not None and snapshot.done():
                        _show(view, snapshot)
                        snapshot, next_s = None, now_s + interval_s
                    for key in keyboard.wait(KEY_S):
                        view.press(key)
                        live.refresh()
            finally:
                live.stop()
    finally:
        poller.shutdown(wait=False, cancel_futures=True)


def _show(view: View, snapshot: Future[Snapshot]) -> None:
    """Show a snapshot, or why there is none."""
    try:
        seen = snapshot.result()
    except TandemError as error:
        view.failed(error)
    else:
        view.answered(seen)


def _print_snapshots(
    admin: AdminClient,
    address: str,
    history: SnapshotHistory,
    interval_s: float,
    *,
    once: bool,
    as_json: bool,
) -> None:
    """Print each snapshot below the previous one."""
    while True:
        time.sleep(interval_s)
        clock = time.strftime("%H:%M:%S")
        with Waits(f"waiting: {address} has not answered since {clock}; still asking"):
            history.add(take_snapshot(admin))
        view = view_of(history)
        if as_json:
            content = as_plain(view)
            typer.echo(json.dumps(content.pop("stats") | content))
        else:
            console = Console()
            is_ascii = console.options.ascii_only
            console.print(table(view, console.width, ascii_only=is_ascii))
        if once:
            return
