"""`tandem cache`: the prefix cache of a running server."""

from __future__ import annotations

import typer

from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import EXIT_CODES_HELP, readable_errors
from tandem_client.cli.shared.waiting import operators_of

cache = typer.Typer(help="Manage the prefix cache of a running server.", no_args_is_help=True)


@cache.callback()
def _cache() -> None:
    pass


@cache.command(epilog=EXIT_CODES_HELP)
@readable_errors
@takes_access
def flush(
    *, channel: ChannelOptions, address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS
) -> None:
    """Forget everything cached; running requests go on."""
    with operators_of(address, channel) as admin:
        typer.echo(f"{admin.flush_prefix_cache()} blocks freed")
