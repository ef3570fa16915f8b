"""Description of a service, with the table of its options, made from the fields of its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tandem.settings.options import Group, Option, ServiceName, ServiceTable, keys_of
from tandem.settings.schema import Alias, Metavar, OptionGroup, S, ServiceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Generic[S]):
    """
    Description of a service for the reading of its settings.

    Attributes:
        schema: Class of its settings.
        command: Command that starts it, for --help.
        description: Description of the service, for --help.
        exit_codes: Meanings of its exit codes, for --help.
        env_prefix: Prefix of its environment variables; the rest is a field's name in capitals.
        foreign_prefixes: Prefixes of variables that begin like its own but belong to others, unless
            the rest is an option of this service.
        foreign_variables: Variables that begin like its own but belong to others.
        other: The other service, whose options a file for both services may have; values of those
            that are not options of this service as well are ignored.
    """

    schema: type[S]
    command: str
    description: str
    exit_codes: str
    env_prefix: str
    foreign_prefixes: tuple[str, ...] = ()
    foreign_variables: frozenset[str] = frozenset()
    other: ServiceName | None = None

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options."""
        return describe(self.schema)

    @property
    def table(self) -> ServiceTable:
        """Its options, for programs that do not import the service."""
        return ServiceTable(env_prefix=self.env_prefix, options=self.options)

    @property
    def aliases(self) -> dict[str, str]:
        """The name of the option that each alias means."""
        return {alias: option.name for option in self.options for alias in option.aliases}

    @property
    def foreign_keys(self) -> tuple[str, ...]:
        """Keys of a file that only the other service uses."""
        if self.other is None:
            return ()
        own = {*self.schema.model_fields, *self.aliases}
        return tuple(key for key in keys_of(self.other) if key not in own)


@functools.cache
def describe(schema: type[ServiceSettings]) -> tuple[Option, ...]:
    """Return the options of a service, group by group; hidden fields are left out."""
    options = [
        Option(
            name=name,
            group=_group(schema, name),
            metavar=None
            if field.annotation is bool
            else _metavar(field.annotation, field.metadata),
            default=_default(field),
            help=field.description or "",
            aliases=tuple(each.name for each in field.metadata if isinstance(each, Alias)),
        )
        for name, field in schema.model_fields.items()
        if not field.exclude
    ]
    order = list(Group)
    return tuple(sorted(options, key=lambda option: order.index(option.group)))


def _group(schema: type[ServiceSettings], name: str) -> Group:
    """Return the group of the class that declares a field."""
    owners = (each for each in schema.__mro__ if name in inspect.get_annotations(each))
    owner = next(owners)
    assert issubclass(owner, OptionGroup)
    return owner.group


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


def _default(field: FieldInfo) -> str | None:
    if field.is_required() or field.default is None:
        return None
    if field.annotation is bool:
        return "on" if field.default else "off"
    return str(field.default)
