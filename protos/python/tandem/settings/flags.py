"""Command line of a service, made from the fields of its settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tandem.errors import InvalidConfig
from tandem.settings.schema import Metavar, Program, S
from tandem.wording import nearest

_ALIKE = 0.85
"""Least similarity of a flag that is suggested for an unknown one; many other flags are alike."""


def flag_of(name: str) -> str:
    """Return the flag that sets a field."""
    return "--" + name.replace("_", "-")


def metavar_of(field: FieldInfo) -> str:
    """Return the placeholder that --help shows for a field's value."""
    return _metavar(field.annotation, field.metadata)


def parse_flags(program: Program[S], argv: Sequence[str]) -> dict[str, str]:
    """
    Return the texts of the flags that were given, by field or alias, with --config.

    Raises:
        InvalidConfig: A flag is unknown, or has no value.
        SystemExit: After --help.
    """
    return vars(_parser(program).parse_args(argv))


class _Parser(argparse.ArgumentParser):
    """Parser that reports mistakes as InvalidConfig, like every other source."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, got")
        unknown = re.search(r"^unrecognized arguments: ([^= ]+)", message)
        flags = self._option_string_actions
        meant = nearest(unknown[1], flags, least_alike=_ALIKE) if unknown else None
        raise InvalidConfig(f"{message}; {f'did you mean {meant}?' if meant else 'see --help'}")


def _parser(program: Program[S]) -> argparse.ArgumentParser:
    prefix = program.env_prefix
    parser = _Parser(
        prog=program.command,
        description=program.description,
        epilog="Sources in rising order: defaults, --preset, --config file, environment "
        f"({prefix} and the flag's name in capitals, for example {prefix}MAX_BATCH_SIZE), flags. "
        "Keys in a file are the flags' names with underscores. Exit codes: "
        f"{program.exit_codes}.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="settings as JSON, or as TOML if *.toml")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in program.schema.model_fields.items():
        if field.exclude:
            continue
        title = next((title for title, names in program.groups.items() if name in names), "service")
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        _add(group, name, field, _help(field))
        for alias in (alias for alias, known in program.aliases.items() if known == name):
            _add(group, alias, field, f"same as {flag_of(name)}")
    return parser


def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo, text: str) -> None:
    if field.annotation is bool:
        group.add_argument(flag_of(name), action="store_const", const="true", help=text)
        off = f"switches {flag_of(name)} off" if field.default is True else argparse.SUPPRESS
        group.add_argument(
            f"--no-{flag_of(name)[2:]}", action="store_const", const="false", dest=name, help=off
        )
    else:
        group.add_argument(flag_of(name), metavar=metavar_of(field), help=text)


def _metavar(kind: Any, notes: Sequence[Any]) -> str:
    for note in notes:
        if isinstance(note, Metavar):
            return note.text
    members = get_args(kind)
    if get_origin(kind) is Annotated:
        return _metavar(members[0], members[1:])
    if get_origin(kind) is Literal:
        return "{" + ",".join(members) + "}"
    if get_origin(kind) in (Union, UnionType):
        return _metavar(next(member for member in members if member is not NoneType), ())
    return {int: "INT", float: "FLOAT", Path: "FILE"}.get(kind, "NAME")


def _help(field: FieldInfo) -> str:
    has_default = not field.is_required() and field.default is not None
    default = f" (default: {field.default})" if has_default else ""
    return f"{field.description}{default}".replace("%", "%%")
