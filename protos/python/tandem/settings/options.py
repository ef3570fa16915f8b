"""
Options of the services, as data: every flag with its placeholder, default, help and other names.

A service declares its options as the fields of its settings (`scheduler_svc.config`,
`executor_svc.config`). `python protos/generate.py` writes them to `options.json`, from which a
program reads them that does not import the service: the command line, and the other service.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ServiceName = Literal["executor", "scheduler"]
FILE = Path(__file__).with_name("options.json")


class Group(enum.StrEnum):
    """Title under which --help lists options together, in this order."""

    ADDRESSES = "addresses"
    SECURITY = "encryption and identity"
    MODEL = "model"
    LIMITS = "engine limits"
    KV_MEMORY = "KV memory instead of max_num_blocks"
    SCHEDULING = "scheduling"
    COMPUTING = "computing"
    SERVICE = "service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """
    One option of a service.

    Attributes:
        name: Name with underscores, which is the key of a file.
        group: Group that it belongs to.
        metavar: Placeholder of the value in --help; None for a switch, --x and --no-x.
        default: Default as text, "on" or "off" for a switch; None if `help` says what unset means.
        help: Purpose, as a clause without a full stop.
        aliases: Other accepted names, those of vLLM, SGLang and Megatron Core among them.
    """

    name: str
    group: Group
    metavar: str | None
    default: str | None
    help: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTable:
    """
    All options of a service.

    Attributes:
        env_prefix: Prefix of its environment variables; the rest is an option's name in capitals.
        options: Its options, group by group.
    """

    env_prefix: str
    options: tuple[Option, ...]


def flag_of(name: str) -> str:
    """Return the flag of an option's name or alias."""
    return "--" + name.replace("_", "-")


def as_json(tables: Mapping[ServiceName, ServiceTable]) -> str:
    """Return the text of `options.json`."""
    rows = {service: asdict(table) for service, table in tables.items()}
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


@functools.cache
def table_of(service: ServiceName) -> ServiceTable:
    """Return the options of a service, with the prefix of its environment variables."""
    found = json.loads(FILE.read_text(encoding="utf-8"))[service]
    options = (
        Option(**{**row, "group": Group(row["group"]), "aliases": tuple(row["aliases"])})
        for row in found["options"]
    )
    return ServiceTable(env_prefix=found["env_prefix"], options=tuple(options))


def options_of(service: ServiceName) -> tuple[Option, ...]:
    """Return the options of a service."""
    return table_of(service).options


def keys_of(service: ServiceName) -> tuple[str, ...]:
    """Return the names and aliases of a service's options."""
    return tuple(key for one in options_of(service) for key in (one.name, *one.aliases))
