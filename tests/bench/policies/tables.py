"""Runs the cells of an experiment and puts them into Markdown tables."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from scheduler_svc.simulator.comparison import Outcome, run_one
from scheduler_svc.simulator.printing import lookup


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
        """A column's value per seed; nothing counts as 0."""
        column = COLUMNS[heading]
        found = [lookup(one.results, column.path) for one in self.outcomes]
        return [column.factor * (value or 0.0) for value in found]

    def mean(self, heading: str) -> float:
        """A column's mean over the seeds."""
        return float(np.mean(self.values(heading)))

    def spread(self, heading: str) -> float:
        """Half the distance between a column's largest and smallest value."""
        return float(np.ptp(self.values(heading)) / 2)


def run_cells(
    base: Mapping[str, str], variants: Mapping[str, Mapping[str, str]], seeds: Iterable[int]
) -> list[Cell]:
    """Run every variant with every seed, on all cores."""
    keys = [(label, seed) for label in variants for seed in seeds]
    runs = [{**base, **variants[label], "seed": str(seed)} for label, seed in keys]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(keys, pool.map(run_one, runs), strict=True))
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
    """Markdown lines: one row per variant, the best of each column bold."""
    headings = list(headings)
    lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
    for cell in cells:
        texts = [_text(cell, cells, COLUMNS[heading]) for heading in headings]
        lines.append(f"| {cell.label} | " + " | ".join(texts) + " |")
    return lines


def _text(cell: Cell, cells: list[Cell], column: Column) -> str:
    text = column.text(cell.mean(column.heading))
    if (spread := cell.spread(column.heading)) and column.is_less_better is not None:
        text += f" ±{column.text(spread)}"
    if column.is_less_better is None:
        return text
    means = [one.mean(column.heading) for one in cells]
    noise = max(one.spread(column.heading) for one in cells)
    best = min(means) if column.is_less_better else max(means)
    is_clear = max(means) - min(means) > noise
    is_best = column.text(best) == column.text(cell.mean(column.heading))
    return f"**{text}**" if is_best and is_clear else text
