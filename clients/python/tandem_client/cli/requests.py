"""`tandem requests`: who is in the system, and what happened to one request."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem_client.admin_requests import RequestEvent, RequestList, RequestState, RequestSummary
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS
from tandem_client.cli import options
from tandem_client.cli.failures import readable_errors
from tandem_client.cli.waiting import operators_of

StateName = enum.StrEnum(  # type: ignore[misc]  # typer wants an enum of the names
    "StateName", [state.name.lower() for state in RequestState if state]
)


@readable_errors
def requests(
    *,
    request_id: Annotated[
        str | None,
        typer.Argument(help="Show this request's events, if the server tracks them."),
    ] = None,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Only this tenant's; \"\" for nobody's.")
    ] = None,
    state: Annotated[
        list[StateName] | None, typer.Option("--state", help="Only in this state; may be repeated.")
    ] = None,
    max_results: Annotated[int, typer.Option("--max", min=1, help="Most to show.")] = 100,
    as_json: options.Json = False,
) -> None:
    """
    List the requests in the system, or the events of one.

    The oldest request comes first. Events are kept by servers with --track-request-events.
    """
    with operators_of(address) as admin:
        if request_id is not None:
            _show_events(admin.request_events(request_id), as_json=as_json)
            return
        states = [RequestState[name.upper()] for name in state or ()]
        found = admin.list_requests(max_results=max_results, tenant=tenant, states=states)
        _show_list(found, as_json=as_json)


def _show_list(found: RequestList, *, as_json: bool) -> None:
    if as_json:
        rows = [_as_json(one, state=one.state.name) for one in found.requests]
        typer.echo(json.dumps({"requests": rows, "total": found.total}))
        return
    table = Table(
        "request/choice", "state", "tenant", "prio", "prompt (cached)", "output", "age",
        "preempted",
        box=None,
    )  # fmt: skip
    for one in found.requests:
        table.add_row(*_row(one))
    Console().print(table)
    if found.total > len(found.requests):
        typer.secho(f"{found.total - len(found.requests)} more; see --max", err=True, dim=True)


def _row(one: RequestSummary) -> tuple[str, ...]:
    return (
        f"{one.request_id}/{one.choice}",
        one.state.name.lower(),
        one.tenant,
        str(one.priority),
        f"{one.prompt_tokens} ({one.cached_tokens})",
        str(one.output_tokens),
        f"{one.age_s:.1f} s",
        str(one.preemptions),
    )


def _show_events(events: list[RequestEvent], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_as_json(event, kind=event.kind.name) for event in events]))
        return
    table = Table("at", "choice", "event", "detail", box=None)
    for event in events:
        if event.dropped_events:
            table.add_row("", str(event.choice), f"({event.dropped_events} not kept)", "")
        detail = event.detail if event.token_id is None else f"token {event.token_id}"
        table.add_row(f"{event.at_s:.3f} s", str(event.choice), event.kind.name, detail)
    Console().print(table)


def _as_json(one: RequestSummary | RequestEvent, **names: str) -> dict[str, Any]:
    return dataclasses.asdict(one) | names
