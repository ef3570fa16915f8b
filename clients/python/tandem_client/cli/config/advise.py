"""`tandem config advise`: advice on the settings of a running server, from its counters."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tandem_client.admin import AdminClient
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS, ChannelOptions
from tandem_client.cli.config.advice import Advice
from tandem_client.cli.config.advice import advise as advise_on
from tandem_client.cli.config.load import Load, load_between
from tandem_client.cli.shared import options
from tandem_client.cli.shared.access import takes_access
from tandem_client.cli.shared.failures import fail, readable_errors
from tandem_client.cli.shared.waiting import Waits, no_answer

SAMPLE_EVERY_S = 1.0
COLOURS = {"ok": "green", "change": "yellow"}


@readable_errors
@takes_access
def advise(
    *,
    channel: ChannelOptions,
    admin_address: options.AdminAddress = DEFAULT_ADMIN_ADDRESS,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to watch the server.")] = 10.0,
    as_json: options.Json = False,
) -> None:
    """Watch a running server for a while and say which settings to change, and why."""
    load = _watch(admin_address, channel, seconds)
    findings = advise_on(load)
    if as_json:
        report = {"load": asdict(load), "advice": [asdict(one) for one in findings]}
        typer.echo(json.dumps(report))
        return
    for one in findings:
        typer.secho(f"{one.verdict:6}", fg=COLOURS[one.verdict], nl=False)
        typer.echo(f"  {one.subject}: {one.fact}{_what_to_do(one)}")


def _watch(admin_address: str, channel: ChannelOptions, seconds: float) -> Load:
    with AdminClient(admin_address, retry=options.RETRY, options=channel) as admin:
        with Waits(no_answer(admin_address)):
            settings: dict[str, Any] = {one.name: one.value for one in admin.config()}
        samples = [admin.stats()]
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 or len(samples) == 1:
            time.sleep(max(0.0, min(SAMPLE_EVERY_S, left)))
            samples.append(admin.stats())
    try:
        return load_between(samples, settings)
    except ValueError:
        raise fail("the server was restarted meanwhile: ask again") from None


def _what_to_do(one: Advice) -> str:
    to = f" to {one.value:g}" if one.value is not None else ""
    return f"; {one.advice}{to}" if one.advice else ""
