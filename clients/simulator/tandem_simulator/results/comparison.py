"""Comparison of simulations that differ in a few values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import InvalidConfig
from tandem_simulator.recorder import Recorder
from tandem_simulator.results.summary import summarize
from tandem_simulator.settings import ALIASES, build
from tandem_simulator.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    Outcome of one simulation.

    Attributes:
        varied: Values in which it differs from the others of its comparison, as texts by name.
        settings: All values that it ran with.
        results: Numbers, see `summary.summarize`.
        recorder: Record of everything that happened.
        wall_s: Wall time of the simulation on this machine, seconds.
    """

    varied: dict[str, str]
    settings: dict[str, Any]
    results: dict[str, Any]
    recorder: Recorder
    wall_s: float

    @property
    def label(self) -> str:
        """Varied values in one line."""
        return ", ".join(f"{name}={text}" for name, text in self.varied.items())

    def as_json(self) -> dict[str, Any]:
        """Return the parts that depend on the arguments alone."""
        return {"varied": self.varied, "settings": self.settings, "results": self.results}


def parse_axis(text: str) -> tuple[str, list[str]]:
    """
    Read `name=a,b,c`, with dashes or underscores in the name.

    Raises:
        InvalidConfig: The text has another form, or names a value twice.
    """
    name, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",")]
    if not equals or not name.strip() or not all(found):
        raise InvalidConfig(f"{text!r} is no comparison: write NAME=VALUE,VALUE,...")
    if len(set(found)) < len(found):
        raise InvalidConfig(f"{text!r} names a value twice")
    name = name.strip().replace("-", "_")
    return ALIASES.get(name, name), found


def grid(axes: Sequence[tuple[str, list[str]]]) -> list[dict[str, str]]:
    """
    Return every combination of values, of which the last name varies fastest.

    Without names there is one empty combination.

    Raises:
        InvalidConfig: A name is given twice.
    """
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise InvalidConfig(f"a name is compared twice: {', '.join(names)}")
    combinations = itertools.product(*(values for _, values in axes))
    return [dict(zip(names, values, strict=True)) for values in combinations]


def run_grid(texts: Mapping[str, str], cells: Sequence[dict[str, str]]) -> Iterator[Outcome]:
    """
    Run one simulation per cell, each with `texts` overlaid by the cell's values.

    Raises:
        InvalidConfig: A value of a cell is wrong; then no simulation has run.
        InternalError: A simulation got stuck, or a check failed.
    """
    for cell in cells:
        build({**texts, **cell})
    for cell in cells:
        yield run_one({**texts, **cell}, cell)


def run_one(texts: Mapping[str, str], varied: dict[str, str] | None = None) -> Outcome:
    """
    Run one simulation.

    Raises:
        InvalidConfig: A value is wrong.
        InternalError: The simulation got stuck, or a check failed.
    """
    experiment = build(texts)
    simulation = Simulation(experiment.setup, experiment.requests)
    began = time.perf_counter()
    recorder = simulation.run()
    wall_s = time.perf_counter() - began
    return Outcome(
        varied=varied or {},
        settings=experiment.settings,
        results=summarize(
            recorder,
            total_blocks=experiment.setup.total_blocks,
            num_executors=experiment.setup.num_executors,
            slo_ttft_s=experiment.slo_ttft_s,
            slo_tpot_s=experiment.slo_tpot_s,
        ),
        recorder=recorder,
        wall_s=wall_s,
    )
