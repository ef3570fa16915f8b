"""Options of every command that calls a server: certificates and the API key."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem_client.channel import Access, ChannelOptions

_PANEL = "Encryption and identity"
_RECEIVER = "channel"
"""Parameter in which a command takes the settings of its connections."""

ACCESS_OPTIONS = {
    "ca": Annotated[
        Path | None,
        typer.Option(
            "--ca",
            envvar="TANDEM_CLIENT_CA",
            metavar="FILE",
            help="Certificates that sign the server's, in PEM format; calls are then encrypted.",
            rich_help_panel=_PANEL,
        ),
    ],
    "cert": Annotated[
        Path | None,
        typer.Option(
            "--cert",
            envvar="TANDEM_CLIENT_CERT",
            metavar="FILE",
            help="Certificate to show to the server; needs --key.",
            rich_help_panel=_PANEL,
        ),
    ],
    "key": Annotated[
        Path | None,
        typer.Option(
            "--key",
            envvar="TANDEM_CLIENT_KEY",
            metavar="FILE",
            help="Private key of --cert.",
            rich_help_panel=_PANEL,
        ),
    ],
    "server_name": Annotated[
        str | None,
        typer.Option(
            "--server-name",
            envvar="TANDEM_CLIENT_SERVER_NAME",
            metavar="NAME",
            help="Name in the server's certificate, if it is not that of the address.",
            rich_help_panel=_PANEL,
        ),
    ],
    "api_key": Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="TOKEN",
            help="Token to send with every call; other users of this machine see it here, and not "
            "in the variable TANDEM_API_KEY.",
            rich_help_panel=_PANEL,
        ),
    ],
}
"""Types and descriptions of the options, by their names in ChannelOptions."""


def takes_access(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with the parameter `channel` these options in its place."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for name, one in signature.parameters.items() if name != _RECEIVER]
    at = sum(one.kind is not one.VAR_KEYWORD for one in own)
    own[at:at] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in ACCESS_OPTIONS.items()
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        access: Access = {name: given.pop(name, None) for name in ACCESS_OPTIONS}  # type: ignore[assignment]  # its keys are those of Access
        command(**given, **{_RECEIVER: ChannelOptions(**access)})

    wrapped.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]  # typer reads it
    return wrapped


def used_with(channel: ChannelOptions, up: Path | None) -> ChannelOptions | None:
    """Return the settings for a command's server; None for one that it starts itself (`--up`)."""
    return channel if up is None else None
