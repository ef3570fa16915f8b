"""Runs the cells of an experiment and puts them into Markdown tables."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from tandem_simulator.results.comparison import Outcome, run_one
from tandem_simulator.results.printing import lookup
from tandem_simulator.settings import build


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """One column: heading, path in the results, factor, decimals, and whether less is better."""

    heading: str
    path: str
    factor: float = 1.0
    decimals: int = 0
    is_less_better: bool | None = None

    def text(self, value: float) -> str:
        return f"{value:,.{self.decimals}f}"


COLUMNS = {
    column.heading: column
    for column in (
        Column(heading="out tok/s", path="throughput.output_tokens_per_s", is_less_better=False),
        Column(heading="good/s", path="throughput.goodput_per_s", decimals=2, is_less_better=False),
        Column(heading="TTFT p50", path="ttft_s.p50", factor=1e3, is_less_better=True),
        Column(heading="TTFT p99", path="ttft_s.p99", factor=1e3, is_less_better=True),
        Column(heading="TTFT max", path="ttft_s.max", factor=1e3, is_less_better=True),
        Column(heading="ITL p50", path="inter_token_s.p50", factor=1e3, decimals=1, is_less_better=True),
        Column(heading="ITL p99", path="inter_token_s.p99", factor=1e3, decimals=1, is_less_better=True),
        Column(heading="ITL max", path="inter_token_s.max", factor=1e3, is_less_better=True),
        Column(heading="e2e p50", path="end_to_end_s.p50", factor=1e3, is_less_better=True),
        Column(heading="e2e p99", path="end_to_end_s.p99", factor=1e3, is_less_better=True),
        Column(heading="preempted", path="memory.preemptions"),
        Column(heading="recomputed", path="tokens.recomputed"),
        Column(heading="swapped", path="memory.swapped_out_blocks"),
        Column(heading="hit %", path="tokens.cache_hit_ratio", factor=100, decimals=1, is_less_better=False),
        Column(heading="KV %", path="memory.mean_kv_usage", factor=100, decimals=1),
        Column(heading="rows", path="steps.mean_rows", decimals=1),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant on one workload, once per seed."""

    label: str
    outcomes: list[Outcome]

    def values(self, heading: str) -> list[float]:
        """Return a column's value per seed; a missing one counts as 0."""
        column = COLUMNS[heading]
        found = [lookup(one.results, column.path) for one in self.outcomes]
        return [column.factor * (value or 0.0) for value in found]

    def mean(self, heading: str) -> float:
        """Return a column's mean over the seeds."""
        return float(np.mean(self.values(heading)))

    def changes(self, heading: str, base: Cell) -> list[float]:
        """
        Return a column's share of the base's, seed by seed, less 1: both ran the same requests, so
        what differs between seeds does not blur what differs between variants.
        """
        pairs = zip(self.values(heading), base.values(heading), strict=True)
        return [mine / theirs - 1 if theirs else float(bool(mine)) for mine, theirs in pairs]


_DONE: dict[tuple[tuple[str, Any], ...], Outcome] = {}
"""Finished cells by all settings, since some experiments share runs."""


def _key(run: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(build(run).settings.items()))


def run_cells(
    base: Mapping[str, str], variants: Mapping[str, Mapping[str, str]], seeds: Iterable[int]
) -> list[Cell]:
    """Run every variant with every seed, on all cores."""
    keys = [(label, seed) for label in variants for seed in seeds]
    runs = [{**base, **variants[label], "seed": str(seed)} for label, seed in keys]
    fresh = [run for run in runs if _key(run) not in _DONE]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for run, outcome in zip(fresh, pool.map(run_one, fresh), strict=True):
            _DONE[_key(run)] = outcome
    found = {key: _DONE[_key(run)] for key, run in zip(keys, runs, strict=True)}
    return [
        Cell(
            label=label,
            outcomes=[
                dataclasses.replace(found[label, seed], varied=dict(texts)) for seed in seeds
            ],
        )
        for label, texts in variants.items()
    ]


def comparison_table(cells: list[Cell], headings: Iterable[str]) -> list[str]:
    """
    Return Markdown lines: one row per variant, all but the first with their change against it.
    """
    columns = [COLUMNS[heading] for heading in headings]
    heads = " | ".join(column.heading for column in columns)
    lines = [f"| | {heads} |", "|---|" + "---:|" * len(columns)]
    for cell in cells:
        texts = " | ".join(_text(cell, cells[0], column) for column in columns)
        lines.append(f"| {cell.label} | {texts} |")
    return lines


def _text(cell: Cell, base: Cell, column: Column) -> str:
    text = column.text(cell.mean(column.heading))
    if cell is base or column.is_less_better is None or not base.mean(column.heading):
        return text
    changes = 100 * np.array(cell.changes(column.heading, base))
    change, spread = float(changes.mean()), float(np.ptp(changes) / 2)
    shown = f"{change:+.0f}" if round(change) else "0"
    shown += f" ±{spread:.0f}" if round(spread) else ""
    is_clear = abs(change) >= 1 and abs(change) > spread
    is_better = is_clear and (change < 0) == column.is_less_better
    return f"{text} ({shown} %)" if not is_better else f"{text} (**{shown} %**)"
