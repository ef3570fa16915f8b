"""`tandem suspend` and `tandem resume`: a pause of a server, which can free its KV memory."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from tandem_client.admin.requests import KvMode
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.waiting import operators_of

KvModeName = enum.StrEnum(  # type: ignore[misc]  # typer wants an enum of the names
    "KvModeName", [mode.name.lower() for mode in KvMode]
)
_PERSIST = KvModeName(KvMode.PERSIST.name.lower())


@readable_errors
@takes_access
def suspend(
    *,
    channel: ChannelOptions,
    address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    kv_mode: Annotated[
        KvModeName,
        typer.Option(
            "--kv-mode",
            help="KV memory stays, is copied to host memory, or is dropped and computed again.",
        ),
    ] = _PERSIST,
) -> None:
    """Stop computing until `tandem resume`; requests wait."""
    with operators_of(address, channel) as admin:
        memory = admin.suspend(KvMode[kv_mode.name.upper()])
    typer.echo(f"suspended; {memory / 2**20:.0f} MiB of device memory in use")


@readable_errors
@takes_access
def resume(
    *, channel: ChannelOptions, address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS
) -> None:
    """Continue after `tandem suspend`."""
    with operators_of(address, channel) as admin:
        admin.resume()
    typer.echo("resumed")
