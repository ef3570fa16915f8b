"""Root of the command line: the list of commands; each is loaded only when it is run."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from tandem_client.cli.shared.exit_codes import EXIT_CODES_HELP, ExitCode
from tandem_client.cli.shared.help_texts import PASS_ON, PlainHelp, hide_switch_types


@dataclass(frozen=True, slots=True)
class Entry:
    """
    A command of the root.

    Attributes:
        module: Module that defines the command, under the package `tandem_client.cli`.
        summary: Line of the command in the list of commands.
        name: Name of the function or the group in the module; None = that of the command.
        passes_on: True if another program reads all arguments.
        has_plain_help: True if the names of options are too long for help in boxes.
        needs: Package without which the command cannot run; None = the client is enough.
    """

    module: str
    summary: str
    name: str | None = None
    passes_on: bool = False
    has_plain_help: bool = False
    needs: str | None = None


COMMANDS = {
    "up": Entry(
        "up.command",
        "Start an executor and a scheduler, and serve until Ctrl-C.",
        has_plain_help=True,
        needs="scheduler_svc",
    ),
    "generate": Entry("generation.generate", "Continue a prompt, and print the text as it comes."),
    "batch": Entry(
        "generation.batch", "Complete the prompts of a file, several at a time, into another file."
    ),
    "chat": Entry("generation.chat", "Talk with the model; it remembers the conversation."),
    "tokenize": Entry("generation.tokens", "Print the token ids of a prompt."),
    "detokenize": Entry("generation.tokens", "Print the text of token ids."),
    "top": Entry("top.command", "Watch what a running server does."),
    "models": Entry("operation.models", "List the models that a running server serves."),
    "show": Entry("operation.models", "Show a served model with its limits."),
    "requests": Entry(
        "operation.requests", "List the requests in the system, or the events of one."
    ),
    "abort": Entry(
        "operation.abort", "End live requests; their streams keep the output produced so far."
    ),
    "executors": Entry(
        "operation.executors", "List the executors that serve; add, drain or remove one."
    ),
    "profile": Entry("operation.profile", "Record a trace of the executor's next steps."),
    "doctor": Entry("doctor", "Check this machine, and a server if one is running."),
    "gateway": Entry(
        "programs",
        "Serve OpenAI's HTTP API in front of running servers.",
        passes_on=True,
        needs="tandem_openai_gateway",
    ),
    "console": Entry(
        "programs",
        "Serve a web page that shows what a running server does.",
        passes_on=True,
        needs="tandem_console",
    ),
    "simulate": Entry(
        "programs",
        "Compare scheduling policies on a virtual clock.",
        passes_on=True,
        needs="tandem_simulator",
    ),
    "drain": Entry(
        "operation.drain", "Stop admission, finish or hand over what runs, free the executor."
    ),
    "suspend": Entry("operation.suspend", "Stop computing until `tandem resume`; requests wait."),
    "resume": Entry("operation.suspend", "Continue after `tandem suspend`.", "resume"),
    "config": Entry(
        "config.commands", "Show, check, suggest and judge configurations.", "config_commands"
    ),
    "token": Entry("operation.new_token", "Make a token, and print its entry for a tokens file."),
    "cache": Entry("operation.cache", "Manage the prefix cache of a running server."),
    "bench": Entry(
        "programs",
        "Measure a running server, or its parts alone.",
        passes_on=True,
        needs="tandem_bench",
    ),
}


class LoadsWhenNamed(TyperGroup):
    """
    A group that knows its commands by name, and imports the module of the one that is run.

    Attributes:
        on_loaded: Called when the command is loaded, before its arguments are read.
    """

    on_loaded: Callable[[], object] | None = None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as any group does, without the types of switches."""
        hide_switch_types(self)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command as any group does, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        loaded = load(name)
        if self.on_loaded is not None:
            self.on_loaded()
        return name, loaded, rest


def load(name: str) -> Any:
    """Import a command of the root."""
    entry = COMMANDS[name]
    if entry.needs is not None and find_spec(entry.needs) is None:
        typer.echo(
            f"tandem: {name} is part of the distribution tandem-serve, which is not installed here "
            "(tandem-client holds the client alone)",
            err=True,
        )
        raise typer.Exit(int(ExitCode.USAGE))
    module = import_module(f"tandem_client.cli.{entry.module}")
    command = getattr(module, entry.name or name)
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
    elif entry.passes_on:
        holder.command(name, context_settings=PASS_ON)(command)
    else:
        help_class = PlainHelp if entry.has_plain_help else TyperCommand
        holder.command(name, epilog=EXIT_CODES_HELP, cls=help_class)(command)
    loaded = get_group(holder).commands[name]
    hide_switch_types(loaded)
    return loaded


app = typer.Typer(
    name="tandem",
    cls=LoadsWhenNamed,
    help="Serve language models and talk to them.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _not_loaded() -> None:
    """Stand for a command in the list of commands."""


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.summary)(_not_loaded)


_HOLDERS = ("tandem-serve", "tandem-client")
"""Distributions that hold this client; the first one that is installed tells its version."""


def _print_version(wanted: bool) -> None:
    if wanted:
        # This takes a moment, and is rarely used.
        from importlib.metadata import distributions  # noqa: PLC0415  # see above

        named = {one.name: one.version for one in distributions() if one.name in _HOLDERS}
        typer.echo(next((named[name] for name in _HOLDERS if name in named), "unknown"))
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
    command = get_command(app)
    assert isinstance(command, LoadsWhenNamed)
    # A shell starts background jobs with SIGINT ignored; the handler makes a SIGINT end us still.
    # Before the command is loaded there is nothing to clean up, and Ctrl-C just ends the process.
    command.on_loaded = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    _prepare_streams()
    try:
        command(prog_name="tandem")
    except OSError as error:  # of help and the version; commands have their own words
        from tandem_client.cli.shared.failures import (  # noqa: PLC0415  # rarely used
            cannot_write,
            unwritten,
        )

        if not cannot_write(error):
            raise
        sys.exit(unwritten(error).exit_code)


def _prepare_streams() -> None:
    """Make the standard streams take any text; text that is not UTF-8 is refused at its use."""
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "backslashreplace"),  # a terminal may lack characters of ours
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
