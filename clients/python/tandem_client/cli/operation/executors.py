"""`tandem executors`: the executors that serve, and changes to their number."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tandem_client.admin.executors import ExecutorSummary
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.operation.requests import print_table
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.executor_words import as_plain
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.waiting import operators_of

DRAIN_GRACE_S = 30.0


class Action(enum.StrEnum):
    """Change of one executor."""

    ADD = "add"
    DRAIN = "drain"
    REMOVE = "remove"


@readable_errors
@takes_access
def executors(
    *,
    channel: ChannelOptions,
    action: Annotated[
        Action | None, typer.Argument(help="Change one executor; without it, list all.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="Address of the executor, as the list has it."),
    ] = None,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace-s",
            min=0,
            metavar="FLOAT",
            help="Seconds that requests may go on at an executor that is drained.",
            show_default=f"{DRAIN_GRACE_S:g}",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """
    List the executors that serve; add, drain or remove one.

    An executor that is added serves from now on. One that is drained takes no new request; those
    that run there finish within --grace-s or move to the others, without loss, and then it can be
    stopped; add lets it serve again. One that is removed loses its requests to the others at once,
    and is forgotten. A restart of the scheduler goes back to those of its --executor.
    """
    if action is None:
        _refuse_grace(grace_s)
        with operators_of(address, channel) as admin:
            _show(admin.executors(), as_json=as_json)
        return
    if executor is None:
        raise typer.BadParameter(f"name the executor: tandem executors {action} ADDRESS")
    said: dict[str, Any] = {"address": executor}
    if action is Action.DRAIN:
        waits_for = "waiting: requests may go on there for a while"
        with operators_of(address, channel, waits_for) as admin:
            moved = admin.drain_executor(executor, DRAIN_GRACE_S if grace_s is None else grace_s)
        said["moved_requests"] = moved
        text = f"{executor} is drained; {moved} moved. It can be stopped or updated now."
    else:
        _refuse_grace(grace_s)
        with operators_of(address, channel) as admin:
            if action is Action.ADD:
                admin.add_executor(executor)
                text = f"{executor} is added; tandem executors tells when it serves."
            else:
                admin.remove_executor(executor)
                text = f"{executor} is removed."
    typer.echo(json.dumps(said) if as_json else text)


def _refuse_grace(grace_s: float | None) -> None:
    if grace_s is not None:
        raise typer.BadParameter("--grace-s is for tandem executors drain alone")


def _show(found: Sequence[ExecutorSummary], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"executors": [as_plain(one) for one in found]}))
        return
    if not found:
        typer.echo("no executor is named now; add one: tandem executors add ADDRESS")
        return
    rows = [_row(one) for one in found]
    # A column that is empty in every row is left out, to leave room for what there is.
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    print_table(shown, [[row[name] for name in shown] for row in rows])


def _row(one: ExecutorSummary) -> dict[str, str]:
    return {
        "executor": one.address,
        "state": one.state.name.lower(),
        "requests": f"{one.running_requests}/{one.max_requests}",
        "blocks": f"{one.used_blocks}/{one.total_blocks}",
        "cached": str(one.cached_blocks),
        "steps": f"{one.steps:,}",
        "per step": f"{one.usual_step_s * 1000:.1f} ms" if one.usual_step_s else "",
        "lost": str(one.losses) if one.losses else "",
        "away": f"{one.away_s:.0f} s" if one.away_s else "",
        "device": one.device,
        "model": one.model,
        "reached at": one.reached_at if one.reached_at != one.address else "",
        "why": one.why,
    }
