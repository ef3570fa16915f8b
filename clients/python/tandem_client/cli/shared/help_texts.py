"""Layout of --help: no types of switches, and plain text for names too long for boxes."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_OTHERS = "Options"

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that passes all arguments, --help too, to another program."""


class PlainHelp(TyperCommand):
    """A command with help in plain text, one section for each panel of options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as plain text, without boxes."""
        super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                is_option = one.param_type_name == "option"
                title = getattr(one, "rich_help_panel", None) or _OTHERS
                sections.setdefault(title if is_option else "Arguments", []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def hide_switch_types(command: Any) -> None:
    """Hide the types of switches in --help, for a command and its subcommands."""
    context = command.context_class(command)
    for one in command.get_params(context):
        if getattr(one, "is_flag", False):
            one.metavar = ""
    for below in getattr(command, "commands", {}).values():
        hide_switch_types(below)
