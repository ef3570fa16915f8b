"""Results of a run: one JSON file, and one page with the aims and a table for each part."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.parts import Outcome

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """
    A number that a GPU should show, and the number that it showed.

    Attributes:
        text: Description of the aim.
        least: The smallest number that reaches it; or with `is_most`, the largest.
        found: Number that was found; None where it was not measured.
    """

    text: str
    least: float
    found: float | None
    is_most: bool = False

    @property
    def verdict(self) -> str:
        """Verdict in one word."""
        if self.found is None:
            return "not measured"
        reached = self.found <= self.least if self.is_most else self.found >= self.least
        return "reached" if reached else "missed"


def aims(outcomes: Sequence[Outcome]) -> list[Aim]:
    """Return each aim with the median of what belongs to it."""
    decodes = [row for row in _of("decode attention", outcomes) if row["operation"] == "decode"]
    prompts = [row for row in _of("prefill attention", outcomes) if row["operation"] == "prefill"]
    steps = _of("decode steps", outcomes)
    wide = [row for row in _ours(decodes) if _batch(row) >= 32]
    return [
        Aim(
            text="decode attention from 32 rows on, % of copy bandwidth",
            least=85,
            found=_median([row["percent_of_ceiling"] for row in wide]),
        ),
        Aim(
            text="decode attention, times the speed of FlashInfer",
            least=1.0,
            found=_median(_speeds_over_flashinfer(decodes)),
        ),
        Aim(
            text="8B decode step of 32 rows at 1,024 positions, % of the roofline",
            least=75,
            found=_step_percent(steps, "llama-8b"),
        ),
        Aim(
            text="1B decode step of 32 rows at 1,024 positions, % of the roofline",
            least=60,
            found=_step_percent(steps, "llama-1b"),
        ),
        Aim(
            text="prefill attention of long prompts, TFLOP/s",
            least=400,
            found=max((row["tflop_per_s"] for row in _ours(prompts)), default=None),
        ),
        Aim(
            text="device idle between steps of 64 rows through gRPC, %",
            least=3,
            found=next((row["idle_percent"] for row in _of("idle", outcomes)), None),
            is_most=True,
        ),
        Aim(
            text="256 requests offline, times the rate of transformers' continuous batching",
            least=1.0,
            found=_over_transformers(_of("offline", outcomes)),
        ),
    ]


def write_results(
    folder: Path, about: dict[str, Any], outcomes: Sequence[Outcome], *, judges: bool
) -> Path:
    """
    Write `results.json`, `results.md` and, of what parts said, `log.txt`; gives the page. `judges`:
    aims are looked at.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        {name: value for name, value in asdict(outcome).items() if name != "log"}
        for outcome in outcomes
    ]
    (folder / "results.json").write_text(
        json.dumps({"about": about, "parts": parts}, indent=1) + "\n"
    )
    logs = [f"===== {outcome.name}: {outcome.status}\n{outcome.log}\n" for outcome in outcomes]
    (folder / "log.txt").write_text("\n".join(logs))
    page = folder / "results.md"
    page.write_text("\n".join(_page(about, outcomes, judges=judges)) + "\n")
    return page


def _page(about: dict[str, Any], outcomes: Sequence[Outcome], *, judges: bool) -> list[str]:
    lines = ["# On a GPU", "", "Made by `tests/gpu/run`.", ""]
    lines += [f"- {name}: {_cell(text)}" for name, text in about.items()]
    if judges:
        lines += ["", "## Aims", "", *_aims_table(outcomes)]
    lines += ["", "## Parts", ""]
    lines += _table(
        [
            {
                "part": each.name,
                "": each.status,
                "seconds": f"{each.seconds:.1f}",
                "found": _found(each.rows),
            }
            for each in outcomes
        ]
    )
    for outcome in outcomes:
        told = [] if _counts_tests(outcome.rows) else _tables(outcome.rows)
        if outcome.status == "passed" and not told:
            continue
        lines += ["", f"## {outcome.name}", ""]
        if outcome.status != "passed":
            lines += [f"{outcome.status}:", "", "```", outcome.detail, "```", ""]
            told = _tables(outcome.rows)
        lines += told
    return lines


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
                "wanted": f"{'at most' if aim.is_most else 'at least'} {aim.least:g}",
                "found": "-" if aim.found is None else f"{aim.found:.4g}",
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
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(_cell(row[name]) for name in columns)} |" for row in rows)]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "-"
    return str(value)


def _of(name: str, outcomes: Sequence[Outcome]) -> Rows:
    """Return all rows of parts with names that begin so."""
    return [row for each in outcomes if each.name.startswith(name) for row in each.rows]


def _ours(rows: Rows) -> Rows:
    return [row for row in rows if row["implementation"] == "tandem"]


def _batch(row: dict[str, Any]) -> int:
    """Return the batch of a shape that begins with it, such as "B=32 ctx=1024"."""
    return int(row["shape"].split()[0].removeprefix("B="))


def _speeds_over_flashinfer(decodes: Rows) -> list[float]:
    """Return for each shape FlashInfer's fastest time over ours."""
    best: dict[str, float] = {}
    for row in decodes:
        if row["implementation"].startswith("flashinfer"):
            shape = row["shape"]
            best[shape] = min(row["time_us"], best.get(shape, float("inf")))
    return [best[row["shape"]] / row["time_us"] for row in _ours(decodes) if row["shape"] in best]


def _step_percent(steps: Rows, model: str) -> float | None:
    found = [
        row["percent_of_floor"]
        for row in steps
        if (row["model"], row["rows"], row["context"]) == (model, 32, 1024)
    ]
    return _median(found)


def _over_transformers(rows: Rows) -> float | None:
    """
    Return our rate over transformers'; if transformers did not finish, its rate was lower still.
    """
    rates: dict[str, float] = {row["engine"]: row["output_tokens_per_s"] for row in rows}
    finished = any(row["engine"] == "tandem" and row["finished"] for row in rows)
    return rates["tandem"] / rates["transformers"] if finished and len(rates) > 1 else None


def _median(numbers: Sequence[float]) -> float | None:
    middle: Callable[[Sequence[float]], float] = statistics.median
    return middle(numbers) if numbers else None
