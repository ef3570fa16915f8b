"""Command line of a service, made from the table of its options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NoReturn

from tandem.errors import InvalidConfig
from tandem.settings.options import Option, flag_of
from tandem.settings.program import Program
from tandem.wording import nearest

_ALIKE = 0.85
"""Least similarity of a flag that is suggested for an unknown one; many other flags are alike."""


def parse_flags(program: Program[Any], argv: Sequence[str]) -> dict[str, str]:
    """
    Return the texts of the flags that were given, by name or alias, with --config.

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


def _parser(program: Program[Any]) -> argparse.ArgumentParser:
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
    for title, options in groupby(program.options, key=lambda option: option.group):
        group = parser.add_argument_group(title)
        for option in options:
            default = "" if option.default is None else f" (default: {option.default})"
            _add(group, option.name, option, f"{option.help}{default}".replace("%", "%%"))
            for alias in option.aliases:
                _add(group, alias, option, f"same as {flag_of(option.name)}")
    return parser


def _add(group: argparse._ArgumentGroup, name: str, option: Option, text: str) -> None:
    flag = flag_of(name)
    if option.metavar is not None:
        group.add_argument(flag, metavar=option.metavar, help=text)
        return
    group.add_argument(flag, action="store_const", const="true", help=text)
    off = f"switches {flag} off" if option.default == "on" else argparse.SUPPRESS
    group.add_argument(f"--no-{flag[2:]}", action="store_const", const="false", dest=name, help=off)
