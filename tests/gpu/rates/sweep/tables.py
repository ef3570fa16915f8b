"""The tables of tunings that a sweep measures, and their Python source with new entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from kernels.linear import tuning as linear
from kernels.linear.tuning import LinearTiles
from kernels.paged_attention import triton_prefill_tiles as prefill
from kernels.paged_attention import tuning as decode
from kernels.paged_attention.triton_prefill_tiles import TileSize
from kernels.paged_attention.tuning import DecodeTuning
from kernels.sampling import tuning as sampling
from kernels.sampling.tuning import SamplingTiles

Tuning = DecodeTuning | TileSize | LinearTiles | SamplingTiles
Entry = tuple[int, int] | int | None
_LINE_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a table: the operation that reads the table, and the entry's key there."""

    operation: str
    entry: Entry

    def __str__(self) -> str:
        return f"{self.operation} {self.entry}"


@dataclass(frozen=True, slots=True)
class Table:
    """
    One table of tunings.

    Attributes:
        path: File that holds it.
        name: Name of the constant.
        annotation: Type with which it is declared there; empty for none.
        tuning: Class of its values.
        entries: Present entries.
    """

    path: str
    name: str
    annotation: str
    tuning: type[Tuning]
    entries: Mapping[Any, Tuning]


_ATTENTION = "kernels/paged_attention"
TABLES = {
    "decode": Table(
        f"{_ATTENTION}/tuning.py",
        "DECODE_TILES",
        "dict[tuple[int, int], DecodeTuning]",
        DecodeTuning,
        decode.DECODE_TILES,
    ),
    **{
        f"prefill_{kind}": Table(
            f"{_ATTENTION}/triton_prefill_tiles.py", name, "", TileSize, entries
        )
        for kind, name, entries in (
            ("long", "LONG_TILES", prefill.LONG_TILES),
            ("short", "SHORT_TILES", prefill.SHORT_TILES),
            ("invariant", "INVARIANT_TILES", prefill.INVARIANT_TILES),
        )
    },
    "linear": Table(
        "kernels/linear/tuning.py", "TILES", "dict[int, LinearTiles]", LinearTiles, linear.TILES
    ),
    "sampling": Table("kernels/sampling/tuning.py", "TILES", "", SamplingTiles, sampling.TILES),
}
"""Tables by operation. What depends on the model in `for_kv_heads` is not part of an entry."""


def present(key: Key) -> Tuning:
    """Return the entry that the table has now."""
    return TABLES[key.operation].entries[key.entry]


def source(operation: str, winners: Mapping[Key, Tuning]) -> str:
    """Return the declaration of a table as Python source, with the winners in their places."""
    table = TABLES[operation]
    declared = f"{table.name}: {table.annotation}" if table.annotation else table.name
    lines = [f"{declared} = {{"]
    for entry, now in table.entries.items():
        lines += _item(entry, winners.get(Key(operation, entry), now))
    return "\n".join([*lines, "}"])


def sources(winners: Mapping[Key, Tuning]) -> str:
    """Return all tables for which there are winners, each after a comment that names its file."""
    operations = [name for name in TABLES if any(key.operation == name for key in winners)]
    return "\n\n".join(f"# {TABLES[name].path}\n{source(name, winners)}" for name in operations)


def _item(entry: Entry, tuning: Tuning) -> list[str]:
    given = [
        f"{each.name}={value!r}"
        for each in fields(tuning)
        if (value := getattr(tuning, each.name)) != _default(each)
    ]
    opening = f"    {entry!r}: {type(tuning).__name__}("
    line = f"{opening}{', '.join(given)}),"
    if len(line) <= _LINE_LENGTH:
        return [line]
    return [opening, *(f"        {each}," for each in given), "    ),"]


def _default(field: Field[Any]) -> object:
    return object() if field.default is MISSING else field.default
