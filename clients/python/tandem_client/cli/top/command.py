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
from tandem_client.views.look import Look, take_look
from tandem_client.views.looks import Looks
from tandem_client.views.model import as_plain, view_of

LOOK_S = 10.0
"""Longest wait in seconds for one look at a server that stays silent; then the next one begins."""
KEY_S = 0.05
"""Longest wait in seconds for a key before looks are seen to."""


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
    TTFT and ITL have the percentiles of each interval, requests those that run before those that
    wait. A server that stops answering is named, and looked at again when it is back.
    On a terminal q leaves, p pauses, s sorts requests, arrows scroll them, and ? lists the keys.
    With --json each look is one JSON object on a line of its own.
    """
    with AdminClient(address, retry=options.RETRY, options=channel) as admin:
        with Waits(no_answer(address)):
            looks = Looks(take_look(admin), interval_s)
        console = Console()
        # A table that is redrawn in place needs a terminal; a file or pipe gets each look in turn.
        if once or as_json or not console.is_terminal:
            _print_looks(admin, address, looks, interval_s, once=once, as_json=as_json)
            return
        _watch(admin, View(address, looks), console, interval_s)


def _watch(admin: AdminClient, view: View, console: Console, interval_s: float) -> None:
    """
    Take looks until a key or a signal ends it, also while the server does not answer. Looks have a
    thread of their own, so that a key is obeyed at once; closing the connection ends the last one.
    """
    looker = ThreadPoolExecutor(1, thread_name_prefix="look")
    look: Future[Look] | None = None
    try:
        with stop_signals(), Keyboard() as keyboard, Live(view, console=console) as live:
            view.controls = controls = Controls() if keyboard.is_there else None
            next_s = time.monotonic() + interval_s
            while controls is None or not controls.is_leaving:
                now_s = time.monotonic()
                if look is None and now_s >= next_s:
                    view.ask()
                    look = looker.submit(take_look, admin, deadline_s=LOOK_S)
                elif look is not None and look.done():
                    _show(view, look)
                    look, next_s = None, now_s + interval_s
                for key in keyboard.wait(KEY_S):
                    view.press(key)
                    live.refresh()
    finally:
        looker.shutdown(wait=False, cancel_futures=True)


def _show(view: View, look: Future[Look]) -> None:
    """Show a look, or why there is none."""
    try:
        seen = look.result()
    except TandemError as error:
        view.failed(error)
    else:
        view.answered(seen)


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
            looks.add(take_look(admin))
        view = view_of(looks)
        if as_json:
            content = as_plain(view)
            typer.echo(json.dumps(content.pop("stats") | content))
        else:
            console = Console()
            is_ascii = console.options.ascii_only
            console.print(table(view, console.width, ascii_only=is_ascii))
        if once:
            return
