"""`tandem requests`: the list of requests in the system, and the events of one request."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem_client.admin.client import AdminClient
from tandem_client.admin.requests import RequestEvent, RequestList, RequestState, RequestSummary
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.waiting import operators_of

LARGEST_PAGE = 10_000
"""Most requests that a server lists at once."""
StateName = enum.StrEnum(  # type: ignore[misc]  # typer wants an enum of the names
    "StateName", [state.name.lower() for state in RequestState if state]
)


@readable_errors
@takes_access
def requests(
    *,
    channel: ChannelOptions,
    request_id: Annotated[
        str | None,
        typer.Argument(help="Show this request's events, if the server tracks them."),
    ] = None,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help='Only requests of this tenant; "" for those without one.'),
    ] = None,
    state: Annotated[
        list[StateName] | None,
        typer.Option("--state", help="Only requests in this state; may be repeated."),
    ] = None,
    max_results: Annotated[int, typer.Option("--max", min=1, help="Most requests to show.")] = 100,
    as_json: options.Json = False,
) -> None:
    """
    List the requests in the system, or the events of one.

    The oldest request comes first. Events are kept by servers with --track-request-events.
    """
    with operators_of(address, channel) as admin:
        if request_id is not None:
            _show_events(admin.request_events(request_id), as_json=as_json)
            return
        states = [RequestState[name.upper()] for name in state or ()]
        found = _listed(admin, max_results, tenant, states)
        is_filtered = tenant is not None or bool(states)
        _show_list(found, is_filtered=is_filtered, as_json=as_json)


def _listed(
    admin: AdminClient, most: int, tenant: str | None, states: Sequence[RequestState]
) -> RequestList:
    """Return at most so many requests, from as many pages as they need, as if they were one."""
    rows: list[RequestSummary] = []
    page_token: str | None = None
    while True:
        page = admin.list_requests(
            page_size=min(most - len(rows), LARGEST_PAGE),
            page_token=page_token,
            tenant=tenant,
            states=states,
        )
        rows += page.requests
        page_token = page.next_page_token
        if not page_token or len(rows) >= most:
            return RequestList(requests=tuple(rows), total=page.total, next_page_token=page_token)


def _show_list(found: RequestList, *, is_filtered: bool, as_json: bool) -> None:
    if as_json:
        rows = [_as_json(one, state=one.state.name) for one in found.requests]
        typer.echo(json.dumps({"requests": rows, "total": found.total}))
        return
    if not found.requests:
        typer.echo("no such request is in the system now" if is_filtered else _NONE)
        return
    rows = [_row(one) for one in found.requests]
    # A column that has the usual value in every row is left out, to leave room for the ids.
    shown = [name for name in rows[0] if any(row[name] != _USUAL.get(name) for row in rows)]
    print_table(shown, [[row[name] for name in shown] for row in rows])
    if found.total > len(found.requests):
        typer.secho(f"{found.total - len(found.requests)} more; see --max", err=True, dim=True)


_NONE = "no request is in the system now"
_USUAL = {"choice": "0", "tenant": "", "priority": "0", "cached": "0", "preempted": "0"}
"""Usual values by column; a column is left out if every request has the usual value."""


def _row(one: RequestSummary) -> dict[str, str]:
    return {
        "request": one.request_id,
        "choice": str(one.choice),
        "state": one.state.name.lower(),
        "tenant": one.tenant,
        "priority": str(one.priority),
        "prompt": str(one.prompt_tokens),
        "cached": str(one.cached_tokens),
        "output": str(one.output_tokens),
        "age": f"{one.age_s:.1f} s",
        "preempted": str(one.preemptions),
    }


def _show_events(events: list[RequestEvent], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_as_json(event, kind=event.kind.name) for event in events]))
        return
    rows = []
    for event in events:
        if event.dropped_events:
            rows.append(["", str(event.choice), f"({event.dropped_events} not kept)", ""])
        detail = event.detail if event.token_id is None else f"token {event.token_id}"
        rows.append([f"{event.at_s:.3f} s", str(event.choice), event.kind.name, detail])
    print_table(["at", "choice", "event", "detail"], rows)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without cutting cells: a line too long for the terminal continues below."""
    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    for column in table.columns:
        column.no_wrap = True
    console.width = max(console.width, _widths_of(headings, rows))
    console.print(table, soft_wrap=True)


def _widths_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(cell_len, column)) + 2 for column in zip(headings, *rows, strict=True))


def _as_json(one: RequestSummary | RequestEvent, **names: str) -> dict[str, Any]:
    return dataclasses.asdict(one) | names
