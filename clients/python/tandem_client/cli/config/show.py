"""`tandem config`: the settings that a service would run with, or runs with."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem_client.admin import AdminClient
from tandem_client.channel import ChannelOptions
from tandem_client.cli.local_server.service_config import ask_services
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.streams.retry import NO_RETRY


class ServiceName(enum.StrEnum):
    """Service to show the settings of."""

    scheduler = "scheduler"
    executor = "executor"


@readable_errors
@takes_access
def config(
    *,
    channel: ChannelOptions,
    file: Annotated[
        Path | None, typer.Argument(help="Configuration file to check, JSON or TOML.")
    ] = None,
    service: Annotated[
        ServiceName, typer.Option("--service", help="Whose settings.")
    ] = ServiceName.scheduler,
    arg: Annotated[
        list[str] | None,
        typer.Option("--arg", help="A flag of the service, e.g. --arg=--window=2."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME", help="Start from this preset; below the table are all."
        ),
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(
            "--live", metavar="HOST:PORT", help="Ask this admin port of a running server."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check a configuration and show every effective value with its source."""
    arguments = [*(arg or []), *([] if preset is None else [f"--preset={preset}"])]
    report = _of_server(live, channel) if live else _of_service(service, file, arguments)
    if as_json:
        typer.echo(json.dumps(report))
        return
    table = Table("setting", "value", "source")
    for setting in report["settings"]:
        style = None if setting["source"] == "default" else "bold"
        table.add_row(setting["name"], json.dumps(setting["value"]), setting["source"], style=style)
    Console().print(table)
    if "presets" in report:
        typer.echo(f"presets: {', '.join(report['presets'])}")
    for warning in report["warnings"]:
        typer.secho(f"warning: {warning}", err=True, fg="yellow")


def _of_server(admin_address: str, channel: ChannelOptions) -> dict[str, Any]:
    with AdminClient(admin_address, retry=NO_RETRY, options=channel) as admin:
        settings = [
            {"name": one.name, "value": one.value, "source": one.source} for one in admin.config()
        ]
    return {"settings": settings, "warnings": []}


def _of_service(service: ServiceName, file: Path | None, arguments: list[str]) -> dict[str, Any]:
    if file is not None:
        arguments = [*arguments, f"--config={file}"]
    return ask_services({service.value: arguments})[service.value]
