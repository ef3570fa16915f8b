"""
Where settings come from, in rising order: defaults, file, environment, flags.

Every key must be known. Environment variables are `TANDEM_` and the name in capitals; those of the
executor (`TANDEM_EXECUTOR_...`) and the client (`TANDEM_CLIENT_...`) and what Kubernetes injects
for a Service called tandem-something are left to others.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from scheduler_svc.config import ALIASES, LIMITS, LoadedSettings, SchedulerSettings
from tandem.errors import InvalidConfig

ENV_PREFIX = "TANDEM_"
_OTHERS = re.compile(
    r"TANDEM_(CONFIG|EXECUTOR_.+|CLIENT_.+|.+_SERVICE_(HOST|PORT.*)|.+_PORT(_\d+_(TCP|UDP).*)?)"
)
_FIELDS = SchedulerSettings.model_fields


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one source sets: name to (raw value, what the user wrote it as)."""

    source: str
    values: dict[str, tuple[Any, str]]


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedSettings:
    """
    Read and validate all settings.

    Raises:
        InvalidConfig: The first thing wrong, naming the key and where it was set.
        SystemExit: After --help or --version.
    """
    flags = vars(_parser().parse_args(argv))
    config_file = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    layers = [
        *([_file_layer(Path(config_file))] if config_file else []),
        _environment_layer(environ),
        _layer("flag", ((_flag(name), name, value) for name, value in flags.items())),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for name, (raw, written) in layer.values.items():
            values[name] = _convert(name, raw, written, from_text=layer.source != "file")
            sources[name] = layer.source
    settings = SchedulerSettings(**values)
    settings.engine_config().validate()
    return LoadedSettings(settings=settings, sources=sources)


def _file_layer(path: Path) -> _Layer:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidConfig(f"cannot read {path}: {why}") from error
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise InvalidConfig(f"{path} is not valid {kind}: {error}") from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} must hold one JSON object of settings")
    return _layer("file", ((f"{path}: {name}", name, value) for name, value in content.items()))


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    return _layer(
        "environment",
        (
            (f"environment variable {variable}", variable.removeprefix(ENV_PREFIX).lower(), value)
            for variable, value in environ.items()
            if variable.startswith(ENV_PREFIX) and not _OTHERS.fullmatch(variable)
        ),
    )


def _layer(source: str, settings: Any) -> _Layer:
    values: dict[str, tuple[Any, str]] = {}
    for written, name, raw in settings:
        known = ALIASES.get(name, name)
        if known not in _FIELDS:
            raise InvalidConfig(f"{written}: unknown key {name!r}{_suggestion(name)}")
        if known in values:
            raise InvalidConfig(f"{written} and {values[known][1]} set the same: keep one of them")
        values[known] = (raw, written)
    return _Layer(source, values)


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, [*_FIELDS, *ALIASES], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; see --help for all keys"


def _convert(name: str, raw: Any, written: str, *, from_text: bool) -> Any:
    """Files hold typed values and are read strictly; environment and flags hold text."""
    adapter: TypeAdapter[Any] = TypeAdapter(_type_of(_FIELDS[name]))
    try:
        if from_text:
            return None if raw == "" and _optional(name) else adapter.validate_strings(raw)
        return adapter.validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidConfig(f"{written}: {why[0].lower()}{why[1:]}, got {raw!r}") from error
    except TypeError as error:
        raise InvalidConfig(f"{written}: {raw!r} cannot be a setting") from error


def _type_of(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _optional(name: str) -> bool:
    return type(None) in getattr(_FIELDS[name].annotation, "__args__", ())


class _Parser(argparse.ArgumentParser):
    """Reports mistakes like every other source does."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"{message}; see --help")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m scheduler_svc",
        description="Tandem's scheduler service: serves clients, plans steps, drives one executor.",
        epilog="Sources in rising order: defaults, --config file, environment (TANDEM_ and the "
        "flag's name in capitals, for example TANDEM_MAX_NUM_SEQS), flags. Keys in a file are the "
        "flags' names with underscores. Exit codes: 0 stopped, 1 failed, 2 wrong configuration.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="settings as JSON, or as TOML if *.toml")
    limits = parser.add_argument_group("engine limits (unset ones follow the executor)")
    service = parser.add_argument_group("service")
    for name, field in _FIELDS.items():
        group = limits if name in LIMITS else service
        group.add_argument(_flag(name), metavar=_metavar(field), help=_help(field))
        for alias in (alias for alias, known in ALIASES.items() if known == name):
            group.add_argument(_flag(alias), metavar=_metavar(field), help=f"same as {_flag(name)}")
    return parser


def _metavar(field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "{" + ",".join(choices) + "}"
    names = {int: "N", float: "X"}
    if field.annotation in names:
        return names[field.annotation]
    return "FILE" if Path in choices else "HOST:PORT"


def _help(field: FieldInfo) -> str:
    default = "none" if field.default is None else field.default
    return f"{field.description} (default: {default})".replace("%", "%%")
