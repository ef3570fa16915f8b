"""
Results of a run: one JSON file, one page with the aims and a table for each part, and what each
part said. Several commands may add to the same results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tests.gpu.aims import Rows, aims, beside_eager, beside_flashinfer, facts
from tests.gpu.parts import Outcome

_JSON = "results.json"


class UnfitResults(Exception):
    """Results in a folder that cannot be added to; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """
    Outcomes of one command or more.

    Attributes:
        about: Facts about the machine and the versions of the latest command.
        is_tiny: Sizes are tiny, so that no rate means anything and no aim is looked at.
        outcomes: Outcome of each part, when it was run last.
    """

    about: dict[str, Any]
    is_tiny: bool
    outcomes: Sequence[Outcome]


def earlier_outcomes(folder: Path, *, is_tiny: bool) -> list[Outcome]:
    """
    Return the outcomes that earlier commands left in a folder; none if there are no results in it.

    Raises:
        UnfitResults: They cannot be read, or are of other sizes.
    """
    path = folder / _JSON
    if not path.exists():
        return []
    names = {each.name for each in fields(Outcome)}
    try:
        found = json.loads(path.read_text())
        outcomes = [
            Outcome(**{name: value for name, value in part.items() if name in names})
            for part in found["parts"]
        ]
        was_tiny = bool(found["tiny"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnfitResults(f"{path} cannot be read ({error}): move it away") from error
    if was_tiny != is_tiny:
        sizes = {True: "tiny", False: "full"}
        raise UnfitResults(
            f"{path} has results of {sizes[was_tiny]} sizes and this run has {sizes[is_tiny]} "
            "ones: give another folder with --results"
        )
    return outcomes


def merged(earlier: Sequence[Outcome], later: Sequence[Outcome]) -> list[Outcome]:
    """
    Return one outcome for each part: the later one, in the place of the earlier. A part that was
    skipped for lack of time leaves what an earlier command found.
    """
    by_name = {outcome.name: outcome for outcome in earlier}
    for outcome in later:
        if outcome.status != "skipped" or outcome.name not in by_name:
            by_name[outcome.name] = outcome
    return list(by_name.values())


def write_results(folder: Path, results: Results) -> Path:
    """
    Write `results.json`, `results.md` and, where an outcome has what its part said, that into
    `logs`; gives the page.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    parts = [
        {name: value for name, value in asdict(outcome).items() if name != "log"}
        for outcome in results.outcomes
    ]
    content = {"about": results.about, "tiny": results.is_tiny, "parts": parts}
    _write(folder / _JSON, json.dumps(content, indent=1) + "\n")
    for outcome in results.outcomes:
        if outcome.log:
            file = re.sub(r"[^\w.-]+", "-", outcome.name) + ".txt"
            (logs / file).write_text(f"{outcome.name}: {outcome.status}\n{outcome.log}\n")
    page = folder / "results.md"
    _write(page, "\n".join(_page(results)) + "\n")
    return page


def _write(path: Path, text: str) -> None:
    """Write a file in one step: a run may be ended at any time, and the next one reads it."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.replace(path)


def _page(results: Results) -> list[str]:
    lines = ["# On a GPU", "", "Made by `tests/gpu/run`.", ""]
    lines += [f"- {name}: {_cell(text)}" for name, text in results.about.items()]
    if not results.is_tiny:
        lines += ["", "## Aims", "", *_aims_table(results.outcomes)]
        told = facts(results.outcomes)
        lines += ["", "## Beside the aims", "", *_table(told)] if told else []
    lines += ["", "## Parts", "", *_parts_table(results.outcomes)]
    comparisons = {
        "Decode attention beside FlashInfer": beside_flashinfer(results.outcomes),
        "Decode steps with and without a graph": beside_eager(results.outcomes),
    }
    for title, rows in comparisons.items():
        lines += ["", f"## {title}", "", *_table(rows)] if rows else []
    for outcome in results.outcomes:
        lines += _section(outcome)
    return lines


def _section(outcome: Outcome) -> list[str]:
    """Return the tables of a part, and why it did not pass."""
    is_passed = outcome.status == "passed"
    told = [] if is_passed and _counts_tests(outcome.rows) else _tables(outcome.rows)
    if is_passed and not told:
        return []
    lines = ["", f"## {outcome.name}", ""]
    if not is_passed:
        lines += [f"{outcome.status}:", "", "```", outcome.detail, "```", ""]
    return lines + told


def _parts_table(outcomes: Sequence[Outcome]) -> list[str]:
    return _table(
        [
            {
                "part": each.name,
                "": each.status,
                "seconds": f"{each.seconds:.1f}",
                "found": _found(each.rows),
                **each.made,
            }
            for each in outcomes
        ]
    )


def _counts_tests(rows: Rows) -> bool:
    return bool(rows) and "failures" in rows[0]


def _found(rows: Rows) -> str:
    if not _counts_tests(rows):
        return f"{len(rows)} rows" if rows else "-"
    (counts,) = rows
    numbers = {name: count for name, count in counts.items() if isinstance(count, int) and count}
    return ", ".join(f"{count} {name}" for name, count in numbers.items()) or "no tests"


def _aims_table(outcomes: Sequence[Outcome]) -> list[str]:
    return _table(
        [
            {
                "aim": aim.text,
                "wanted": f"{'at most' if aim.is_most else 'at least'} {aim.bound:g}",
                "found": aim.found if aim.found is None else f"{aim.found:.4g}",
                "of": aim.basis or "-",
                "": aim.verdict,
            }
            for aim in aims(outcomes)
        ]
    )


def _tables(rows: Rows) -> list[str]:
    """Return a table for each run of rows with the same columns."""
    lines: list[str] = []
    alike: Rows = []
    for row in [*rows, {}]:
        if alike and row.keys() != alike[0].keys():
            lines += ["", *_table(alike)] if lines else _table(alike)
            alike = []
        alike.append(row)
    return lines


def _table(rows: Rows) -> list[str]:
    columns = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [
        *lines,
        *(f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows),
    ]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "-"
    return str(value)
