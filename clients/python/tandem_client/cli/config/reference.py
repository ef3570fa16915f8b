"""`tandem config reference`: the page on all options of both services."""

from __future__ import annotations

from itertools import groupby

import typer

from tandem.settings.options import Option, ServiceName, flag_of, table_of
from tandem.settings.options import as_json as table_as_json
from tandem_client.cli.shared import options

SERVICES: tuple[ServiceName, ...] = ("scheduler", "executor")
INTRODUCTION = """\
# Options of the services

Every option is a flag, an environment variable, and a key of the file that `--config` names (JSON,
or TOML if *.toml), which is the flag's name with underscores. A flag wins over the environment,
the environment over the file, the file over `--preset`. `tandem up` takes most flags of both
services and passes them on; it sets the others itself.
"""


def reference(*, as_json: options.Json = False) -> None:
    """Print every option of both services, as Markdown."""
    if as_json:
        typer.echo(table_as_json({service: table_of(service) for service in SERVICES}), nl=False)
        return
    typer.echo(as_markdown(), nl=False)


def as_markdown() -> str:
    """Return the page: a chapter for each service, a section for each group of options."""
    lines = [INTRODUCTION]
    for service in SERVICES:
        table = table_of(service)
        lines += [f"## `python -m {service}_svc`", ""]
        for group, found in groupby(table.options, key=lambda option: option.group):
            lines += [f"### {group[0].upper()}{group[1:]}", ""]
            lines += [_entry(option, table.env_prefix) for option in found]
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _entry(option: Option, env_prefix: str) -> str:
    names = [flag_of(name) for name in (option.name, *option.aliases)]
    if option.metavar is None:
        first = f"`{names[0]}`, `--no-{names[0][2:]}`"
    else:
        first = f"`{names[0]} {option.metavar}`"
    others = "".join(f", `{name}`" for name in names[1:])
    default = "" if option.default is None else f" Default: `{option.default}`."
    variable = f"{env_prefix}{option.name.upper()}"
    return f"- {first}{others}, `{variable}`: {option.help}.{default}"
