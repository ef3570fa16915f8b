"""
Prints what several executors bring in the simulator, as tables in Markdown.

    python -m tests.clients.simulator.scaling            # routing: policies, workloads, executors
    python -m tests.clients.simulator.scaling --core     # the CPU time that the core itself takes

All times but the CPU time of the core are virtual. Load and number of requests grow with the number
of executors, so that tokens/s per executor stay the same where nothing is lost.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from tandem_simulator.results.comparison import run_one
from tandem_simulator.settings import build
from tandem_simulator.simulation import Simulation

EXECUTORS = (1, 2, 4, 8, 16, 64)
ROUTINGS = ("load_balanced", "longest_prefix", "first_prefix_block", "round_robin")
MACHINE = {"machine": "h100-8b-tight"}
"""Memory for 48,000 tokens: one executor cannot keep all prefixes of these workloads."""
WORKLOADS: dict[str, tuple[float, dict[str, str]]] = {
    "shared-prefix": (20.0, {}),
    "chat": (100.0, {"think_s": "1"}),
    "agent": (60.0, {"think_s": "0.2"}),
}
"""Requests per second and executor, and other settings, by workload."""
CORE_CALLS = ("expire", "lookahead", "schedule", "apply")
"""Calls of the core per step, of each executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation of the table of policies."""

    workload: str
    routing: str
    executors: int
    requests: int

    def texts(self) -> dict[str, str]:
        """Return its settings."""
        rate, more = WORKLOADS[self.workload]
        return {
            **MACHINE,
            **more,
            "workload": self.workload,
            "routing": self.routing,
            "executors": str(self.executors),
            "requests": str(self.requests * self.executors),
            "request_rate": str(rate * self.executors),
        }


def results_of(case: Case) -> dict[str, Any]:
    """Run one simulation; return its results without the series over time."""
    results = run_one(case.texts()).results
    del results["over_time"]
    return results


class Stopwatch:
    """CPU seconds of this process within some methods, by name."""

    def __init__(self) -> None:
        self.cpu_s = defaultdict[str, float](float)

    def watch(self, thing: Any, names: tuple[str, ...]) -> None:
        """Time every call of these methods of an object from now on."""
        for name in names:
            setattr(thing, name, self._timed(name, getattr(thing, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments, **named)
            finally:
                self.cpu_s[name] += time.process_time() - began

        return timed


def core_cost(case: Case) -> dict[str, float]:
    """Return the CPU time of the core in µs per step, or per request where named so."""
    experiment = build(case.texts())
    simulation, watch = Simulation(experiment.setup, experiment.requests), Stopwatch()
    watch.watch(simulation.core, ("submit", "take_events"))
    for engine in simulation.engines:
        watch.watch(engine.port, CORE_CALLS)
    recorder = simulation.run()
    per_step = 1e6 / len(recorder.step_s)
    # The core's own `schedule` and `submit` call `expire` too: what is counted twice is little.
    names = (*CORE_CALLS, "take_events")
    return {
        "steps": len(recorder.step_s),
        "rows": float(recorder.work[:, 0].mean()),
        **{name: watch.cpu_s[name] * per_step for name in names},
        "all": sum(watch.cpu_s[name] for name in names) * per_step,
        "submit": watch.cpu_s["submit"] * 1e6 / recorder.num_sent,
    }


def policy_tables(
    workloads: list[str], num_requests: int, executors: tuple[int, ...]
) -> Iterator[str]:
    """Yield a table per workload."""
    for workload in workloads:
        cases = [
            Case(workload=workload, routing=routing, executors=count, requests=num_requests)
            for count in executors
            for routing in (ROUTINGS if count > 1 else ROUTINGS[:1])
        ]
        with ProcessPoolExecutor(2) as pool:
            found = dict(zip(cases, pool.map(results_of, cases), strict=True))
        yield "\n".join(_policy_lines(workload, found))


def _policy_lines(workload: str, found: dict[Case, dict[str, Any]]) -> Iterator[str]:
    yield f"**{workload}**\n"
    yield "| executors | routing | TTFT p50, ms | p99, ms | hits, % | max / mean busy | tokens/s each |"
    yield "|---|---|---|---|---|---|---|"
    for case, results in found.items():
        rate = results["throughput"]["output_tokens_per_s"] / case.executors
        cells = (
            str(case.executors),
            f"`{case.routing}`" if case.executors > 1 else "any",
            f"{results['ttft_s']['p50'] * 1e3:,.0f}",
            f"{results['ttft_s']['p99'] * 1e3:,.0f}",
            f"{results['tokens']['cache_hit_ratio'] * 100:.0f}",
            f"{results['steps']['imbalance']:.2f}",
            f"{rate:,.0f}",
        )
        yield f"| {' | '.join(cells)} |"


def core_table(
    workloads: list[str], num_requests: int, executors: tuple[int, ...]
) -> Iterator[str]:
    """Yield the lines of the table of the core's CPU time."""
    yield "| workload | executors | rows | schedule | apply | other | µs per step | µs per submit |"
    yield "|---|---|---|---|---|---|---|---|"
    for workload in workloads:
        for count in executors:
            case = Case(
                workload=workload, routing=ROUTINGS[0], executors=count, requests=num_requests
            )
            cost = core_cost(case)
            other = cost["all"] - cost["schedule"] - cost["apply"]
            numbers = (cost["rows"], cost["schedule"], cost["apply"], other, cost["all"])
            cells = (workload, str(count), *(f"{one:.0f}" for one in (*numbers, cost["submit"])))
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--core", action="store_true", help="the core's CPU time")
    parser.add_argument("--requests", type=int, default=200, help="for each executor")
    parser.add_argument("--executors", default=",".join(map(str, EXECUTORS)), help="how many")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    chosen = parser.parse_args()
    executors = tuple(int(text) for text in chosen.executors.split(","))
    make = core_table if chosen.core else policy_tables
    for part in make(chosen.workloads, chosen.requests, executors):
        print(part, flush=True)  # noqa: T201  # it prints its table
        if not chosen.core:
            print(flush=True)  # noqa: T201  # an empty line between tables


if __name__ == "__main__":
    main()
