"""`tandem config` with its subcommands; the default is `show`, so that a file may follow it."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from tandem_client.cli.config.advise import advise
from tandem_client.cli.config.reference import reference
from tandem_client.cli.config.show import config
from tandem_client.cli.config.suggest import suggest
from tandem_client.cli.shared.failures import EXIT_CODES_HELP


class _ShowsByDefault(TyperGroup):
    """A group in which `tandem config FILE` means `tandem config show FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default subcommand unless the first argument is a subcommand or --help."""
        if not args or args[0] not in {*self.commands, "--help"}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


config_commands = typer.Typer(
    cls=_ShowsByDefault,
    help="Show, check, suggest and judge configurations.",
    epilog="Without a subcommand: show. " + EXIT_CODES_HELP,
)
config_commands.command(name="show", epilog=EXIT_CODES_HELP)(config)
config_commands.command(epilog=EXIT_CODES_HELP)(reference)
config_commands.command(epilog=EXIT_CODES_HELP)(suggest)
config_commands.command(epilog=EXIT_CODES_HELP)(advise)
