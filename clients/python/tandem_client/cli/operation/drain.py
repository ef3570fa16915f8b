"""`tandem drain`: hand a scheduler's requests and its executor over to another one."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.waiting import operators_of


@readable_errors
@takes_access
def drain(
    *,
    channel: ChannelOptions,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace-s",
            help="Seconds that running requests may continue.",
            show_default="the server's",
        ),
    ] = None,
) -> None:
    """
    Stop admission, finish or hand over what runs, free the executor.

    A drained server takes no request again: stop it, and start another.
    """
    with operators_of(address, channel, "waiting: running requests may go on for a while") as admin:
        handed_over = admin.drain(grace_s)
    typer.echo(
        f"drained; {handed_over} handed over. A server of tandem up ends by itself now; stop a "
        "scheduler that was started alone."
    )
