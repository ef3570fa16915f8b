"""
Reader of settings from their sources, in rising order: defaults, preset, file, environment, flags.

Every key must be known. Variables that Kubernetes injects for a Service are ignored, even if its
name begins with the prefix of a service's variables.

Values are converted and checked by pydantic; sources are read here and not by pydantic-settings,
which (2.16, with extra="forbid") ignores an unknown variable that begins with its prefix, keeps no
source of a value and names none in its errors. Places, texts, presets, ignored keys and hints would
stay ours; it would replace the thirty lines that open a file and look at variables.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tandem.errors import InvalidConfig
from tandem.settings.flags import parse_flags
from tandem.settings.options import flag_of
from tandem.settings.presets import PRESET_SETTINGS
from tandem.settings.program import Program
from tandem.settings.schema import KV_SIZE_KNOBS, PRESET, Loaded, S
from tandem.wording import nearest

_SET_BY_KUBERNETES = re.compile(
    r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)"
)
"""Pattern of these variables' names after the prefix."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Setting as one source has it: the key, the value, and its place for error texts."""

    key: str
    raw: Any
    place: str


_Source = Literal["file", "environment", "flag"]


def read_settings(
    program: Program[S], argv: Sequence[str], environ: Mapping[str, str]
) -> Loaded[S]:
    """
    Read and validate all settings.

    Raises:
        InvalidConfig: A setting is wrong; the text names the first such setting and its place.
        SystemExit: After --help.
    """
    flags = parse_flags(program, argv)
    config_file = flags.pop("config", None) or environ.get(f"{program.env_prefix}CONFIG")
    layers: list[tuple[_Source, Iterable[_Given]]] = [
        ("file", _from_file(Path(config_file)) if config_file else ()),
        ("environment", _from_environment(program, environ)),
        ("flag", (_Given(name, text, flag_of(name)) for name, text in flags.items())),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    places: dict[str, str] = {}
    for source, layer in layers:
        for name, given in _by_name(program, source, layer).items():
            values[name] = _convert(program.schema.model_fields[name], given, source)
            sources[name] = source
            places[name] = given.place
    if values.get("preset") is not None:
        _fill_from_preset(program, values, sources, places)
    _check_complete(program, values)
    settings = program.schema(**values)
    settings.engine_config().validate()
    _check_one_kv_size(values, places)
    return Loaded(settings=settings, sources=sources, places=places)


def _fill_from_preset(
    program: Program[S], values: dict[str, Any], sources: dict[str, str], places: dict[str, str]
) -> None:
    """Set the settings that no source set; a KV size set by any knob replaces the preset's."""
    place = f"preset {values['preset']} ({places['preset']})"
    has_kv_size = any(values.get(knob) is not None for knob in KV_SIZE_KNOBS)
    for name, value in PRESET_SETTINGS[values["preset"]].items():
        is_taken = name in values or (has_kv_size and name in KV_SIZE_KNOBS)
        if name in program.schema.model_fields and not is_taken:
            values[name], sources[name], places[name] = value, PRESET, place


def _check_one_kv_size(values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    given = [f"{knob} ({places[knob]})" for knob in KV_SIZE_KNOBS if values.get(knob) is not None]
    if len(given) > 1:
        raise InvalidConfig(
            f"the KV memory is sized more than once, by {' and by '.join(given)}: keep one of them"
        )


def _from_file(path: Path) -> list[_Given]:
    try:
        text = path.read_text(encoding="utf-8")
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
    return [_Given(key, value, f"{path}: {key}") for key, value in content.items()]


def _from_environment(program: Program[S], environ: Mapping[str, str]) -> list[_Given]:
    prefix = program.env_prefix
    own = {f"{prefix}{name.upper()}" for name in program.schema.model_fields}
    return [
        _Given(variable.removeprefix(prefix).lower(), text, f"environment variable {variable}")
        for variable, text in environ.items()
        if variable.startswith(prefix)
        and variable != f"{prefix}CONFIG"
        and (variable in own or not variable.startswith(program.foreign_prefixes))
        and variable not in program.foreign_variables
        and not _SET_BY_KUBERNETES.fullmatch(variable.removeprefix(prefix))
    ]


def _by_name(program: Program[S], source: _Source, layer: Iterable[_Given]) -> dict[str, _Given]:
    fields, aliases = program.schema.model_fields, program.aliases
    keys = {name for name, field in fields.items() if source == "file" or not field.exclude}
    foreign = program.foreign_keys if source == "file" else ()
    found: dict[str, _Given] = {}
    for given in layer:
        name = aliases.get(given.key, given.key)
        if given.key in foreign:
            continue
        if name not in keys:
            known = [*sorted(keys), *aliases, *foreign]
            meant = nearest(given.key, known)
            hint = f"did you mean {meant!r}?" if meant else "see --help for all keys"
            raise InvalidConfig(f"{given.place}: unknown key {given.key!r}; {hint}")
        if name in found:
            places = f"{given.place} and {found[name].place}"
            raise InvalidConfig(f"{places} set the same: keep one of them")
        found[name] = given
    return found


def _convert(field: FieldInfo, given: _Given, source: _Source) -> Any:
    """Convert a value; files have typed values, which are read strictly, other sources text."""
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        if source == "file":
            return adapter.validate_json(json.dumps(given.raw), strict=True)
        if given.raw == "" and type(None) in getattr(field.annotation, "__args__", ()):
            return None
        return adapter.validate_strings(given.raw)
    except ValidationError as error:
        raise InvalidConfig(f"{given.place}: {_why(error)}, got {given.raw!r}") from error
    except TypeError as error:
        raise InvalidConfig(f"{given.place}: {given.raw!r} cannot be a setting") from error


def _why(error: ValidationError) -> str:
    """Return the cause in one clause, which names all types of value that are accepted."""
    first, *others = (each["msg"].removeprefix("Value error, ") for each in error.errors())
    if others:
        kinds = [msg.removeprefix("Input should be ").partition(", ")[0] for msg in others]
        first = " or ".join([first.partition(", ")[0], *kinds])
    return f"{first[0].lower()}{first[1:]}"


def _check_complete(program: Program[S], values: Mapping[str, Any]) -> None:
    for option in program.options:
        name = option.name
        if program.schema.model_fields[name].is_required() and name not in values:
            raise InvalidConfig(
                f"no {name}: give {flag_of(name)} {option.metavar} or set "
                f"{program.env_prefix}{name.upper()}"
            )
