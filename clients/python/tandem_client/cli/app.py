"""The command line's root."""

from __future__ import annotations

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from tandem_client.cli.bench import bench
from tandem_client.cli.cache import cache
from tandem_client.cli.chat import chat
from tandem_client.cli.config_commands import config_commands
from tandem_client.cli.doctor import doctor
from tandem_client.cli.drain import drain
from tandem_client.cli.failures import EXIT_CODES_HELP
from tandem_client.cli.generate import generate
from tandem_client.cli.profile import profile
from tandem_client.cli.requests import requests
from tandem_client.cli.simulate import PASS_ON, simulate
from tandem_client.cli.suspend import resume, suspend
from tandem_client.cli.top import top
from tandem_client.cli.up import up

app = typer.Typer(
    name="tandem",
    help="Serve language models and talk to them.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(epilog=EXIT_CODES_HELP)(up)
app.command(epilog=EXIT_CODES_HELP)(generate)
app.command(epilog=EXIT_CODES_HELP)(chat)
app.command(epilog=EXIT_CODES_HELP)(top)
app.command(epilog=EXIT_CODES_HELP)(requests)
app.command(epilog=EXIT_CODES_HELP)(profile)
app.command(epilog=EXIT_CODES_HELP)(doctor)
app.command(context_settings=PASS_ON)(simulate)
app.add_typer(config_commands, name="config")
app.command(epilog=EXIT_CODES_HELP)(drain)
app.command(epilog=EXIT_CODES_HELP)(suspend)
app.command(epilog=EXIT_CODES_HELP)(resume)
app.add_typer(cache, name="cache")
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("tandem-serve"))
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that the arguments name."""
    command = typer.main.get_command(app)  # takes a moment too, in which Ctrl-C just ends us
    # A shell starts background jobs with SIGINT ignored; whoever sends it to us still means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command(prog_name="tandem")
