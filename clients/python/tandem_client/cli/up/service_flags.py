"""
Flags of the services that `tandem up` takes and passes on unchanged: the services check them.

They are all options of the services (`tandem.settings.options`) but for those that `tandem up`
decides itself. Those of the link between both are decided too: it is a unix socket that only this
user can open, without certificates and tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tandem.settings.options import Group, Option, ServiceName, flag_of, options_of
from tandem_client.cli.local_server.services import LINK_SECURITY

SCHEDULER: ServiceName = "scheduler"
EXECUTOR: ServiceName = "executor"
DECIDED: Mapping[ServiceName, frozenset[str]] = {
    EXECUTOR: frozenset({"model", "listen", "dry_run", "ready_file", *LINK_SECURITY[EXECUTOR]}),
    SCHEDULER: frozenset(
        {
            *("executor", "local_listen", "take_over", "drain_grace_s", "dry_run", "ready_file"),
            *LINK_SECURITY[SCHEDULER],
        }
    ),
}
"""Options of each service that are no flags of `tandem up`, or flags of its own."""


@dataclass(frozen=True, slots=True)
class ServiceFlag:
    """One flag: an option, and the services that take it."""

    option: Option
    services: tuple[ServiceName, ...]

    @property
    def text(self) -> str:
        """Text of the flag in --help, as a sentence."""
        help_text, default = self.option.help, self.option.default
        shown = "" if default is None else f" [default: {default}]"
        return f"{help_text[0].upper()}{help_text[1:]}.{shown}"


def _flags() -> dict[str, ServiceFlag]:
    """Return all flags by name, group by group; the executor's text goes before the scheduler's."""
    flags: dict[str, ServiceFlag] = {}
    for service in (EXECUTOR, SCHEDULER):
        for option in options_of(service):
            if option.name in DECIDED[service]:
                continue
            known = flags.get(option.name)
            flags[option.name] = (
                ServiceFlag(option, (service,))
                if known is None
                else ServiceFlag(known.option, (*known.services, service))
            )
    order = list(Group)
    return dict(sorted(flags.items(), key=lambda named: order.index(named[1].option.group)))


FLAGS = _flags()
"""All flags by name, in the order of --help."""


def takes_service_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with ``**flags`` an option for every flag of the services."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    passed = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_typer_option(flag)
        )
        for name, flag in FLAGS.items()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *passed])  # type: ignore[attr-defined]  # typer reads it
    return command


def flags_for(service: ServiceName, values: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for a service: those of the values that it takes."""
    return arguments_of(
        {name: value for name, value in values.items() if service in FLAGS[name].services}
    )


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for all values that are not None."""
    return [_argument(name, value) for name, value in values.items() if value is not None]


def _typer_option(flag: ServiceFlag) -> Any:
    option = flag.option
    names = [flag_of(name) for name in (option.name, *option.aliases)]
    panel = f"{option.group[0].upper()}{option.group[1:]}"
    if option.metavar is None:
        both = [f"{name}/--no-{name[2:]}" for name in names]
        return Annotated[bool | None, typer.Option(*both, help=flag.text, rich_help_panel=panel)]
    taking = typer.Option(*names, help=flag.text, rich_help_panel=panel, metavar=option.metavar)
    return Annotated[str | None, taking]


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else f"--no-{flag_of(name)[2:]}"
    return f"{flag_of(name)}={value}"
