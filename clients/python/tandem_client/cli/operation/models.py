"""`tandem models` and `tandem show`: what a running server serves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.operation.requests import print_table
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import readable_errors
from tandem_client.cli.shared.waiting import Waits, no_answer
from tandem_client.client import Client

_COLUMNS = ("name", "revision", "architecture", "dtype", "max_model_len", "vocab_size")


@readable_errors
@takes_access
def models(
    *,
    channel: ChannelOptions,
    address: options.Address = DEFAULT_ADDRESS,
    as_json: options.Json = False,
) -> None:
    """
    List the models that a running server serves.
    """
    with (
        Client(address, retry=options.RETRY, options=channel) as client,
        Waits(no_answer(address)),
    ):
        found = client.models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found]))
        return
    print_table(_COLUMNS, [[str(getattr(one, name)) for name in _COLUMNS] for one in found])


@readable_errors
@takes_access
def show(
    *,
    channel: ChannelOptions,
    model: Annotated[
        str | None, typer.Argument(help="Name of the model; unset, the one that is served.")
    ] = None,
    address: options.Address = DEFAULT_ADDRESS,
    as_json: options.Json = False,
) -> None:
    """
    Show a served model with its limits, and the parameters of a request that sets none.
    """
    with (
        Client(address, retry=options.RETRY, options=channel) as client,
        Waits(no_answer(address)),
    ):
        described = dataclasses.asdict(client.get_model(model))
    # The server draws a seed for each request.
    described["default_params"].pop("seed")
    if as_json:
        typer.echo(json.dumps(described))
        return
    for name, value in _flat(described):
        typer.echo(f"{name}: {_shown(value)}")


def _flat(described: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of inner values with the name of the outer one before them."""
    for name, value in described.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
