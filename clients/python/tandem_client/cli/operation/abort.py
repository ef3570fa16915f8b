"""`tandem abort`: end requests that run."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.errors import RequestNotFound
from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import ExitCode, describe, fail, readable_errors
from tandem_client.cli.shared.waiting import Waits, no_answer
from tandem_client.client import Client


@readable_errors
@takes_access
def abort(
    *,
    channel: ChannelOptions,
    request_ids: Annotated[
        list[str],
        typer.Argument(metavar="REQUEST_ID...", help="Ids, as tandem requests lists them."),
    ],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Tenant of the requests, if they have one.")
    ] = None,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """
    End live requests; their streams keep the output produced so far.

    All of them are tried; the exit code is 4 if one of them was not live.
    """
    missing = 0
    with Client(address, retry=options.RETRY, options=channel) as client, Waits(no_answer(address)):
        for request_id in request_ids:
            try:
                client.abort(request_id, tenant=tenant)
            except RequestNotFound as error:
                missing += 1
                typer.echo(f"tandem: {describe(error)}", err=True)
            else:
                typer.echo(f"{request_id} aborted")
    if missing:
        raise fail(f"{missing} of {len(request_ids)} requests were not live", ExitCode.REFUSED)
