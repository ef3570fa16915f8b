"""
Run the scheduler core against a model of an executor on a virtual clock, and print how it went.

What is printed to stdout depends on the arguments alone (unless --core-us measured); how fast the
simulation itself was goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tandem.errors import InternalError, SessionLost, TandemError
from tandem.process.exit_codes import EXIT_FAILED, EXIT_REFUSED
from tandem.process.printing_commands import run_printing
from tandem_simulator.presets import MACHINES
from tandem_simulator.results.comparison import Outcome, grid, parse_axis, run_grid
from tandem_simulator.results.plots import draw, require_matplotlib
from tandem_simulator.results.printing import compare, describe, is_without_difference
from tandem_simulator.settings import ALIASES, SECTIONS, known_names

NO_DIFFERENCE = (
    "all runs are alike: this workload leaves nothing to decide; give one that shares prefixes and "
    "fills the machine, for example --machine h100-8b-tight --workload shared-prefix"
)


def main(arguments: list[str] | None = None) -> int:
    """Simulate and print; return the exit code."""
    chosen = vars(_parser().parse_args(arguments))
    as_json, plot = chosen.pop("json"), chosen.pop("plot")
    axes = chosen.pop("compare", [])
    try:
        if plot is not None:
            require_matplotlib()
        cells = grid([parse_axis(text) for text in axes])
        outcomes = []
        for outcome in run_grid(chosen, cells):
            outcomes.append(outcome)
            _tell_speed(outcome)
        if plot is not None:
            for path in draw(outcomes, Path(plot)):
                sys.stderr.write(f"wrote {path}\n")
    except (InternalError, SessionLost) as error:  # bugs: no flag is wrong
        return _fail(error, EXIT_FAILED)
    except TandemError as error:
        return _fail(error, EXIT_REFUSED)
    if as_json:
        results = [outcome.as_json() for outcome in outcomes]
        _print(json.dumps(results if axes else results[0]))
    else:
        _print(compare(outcomes) if axes else describe(outcomes[0]))
        if is_without_difference(outcomes):
            sys.stderr.write(f"{NO_DIFFERENCE}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    machines = "; ".join(f"{name}: {machine.about}" for name, machine in MACHINES.items())
    parser = argparse.ArgumentParser(
        prog="tandem simulate",
        description=__doc__,
        epilog=f"Machines: {machines}.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value and nothing else")
    parser.add_argument("--plot", metavar="DIR", help="draw plots into this folder")
    parser.add_argument(
        "--compare",
        metavar="NAME=A,B,...",
        action="append",
        default=[],
        help="run once with each value of any name below; given again, every combination",
    )
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for name in known_names().values():
        others = [alias for alias, meant in ALIASES.items() if meant == name.name]
        flags = [f"--{one.replace('_', '-')}" for one in (name.name, *others)]
        about = name.about.replace("%", "%%")
        if name.choices:
            about += f" One of: {', '.join(name.choices)}."
        # Texts are read by `settings.build`, for flags and comparisons alike.
        groups[name.section].add_argument(
            *flags,
            metavar="VALUE",
            nargs="?" if name.is_flag else None,
            const="true" if name.is_flag else None,
            default=argparse.SUPPRESS,
            help=about,
        )
    return parser


def _tell_speed(outcome: Outcome) -> None:
    results = outcome.results
    sent, steps = results["requests"]["sent"], results["steps"]["count"]
    label = f"{outcome.label}: " if outcome.label else ""
    sys.stderr.write(
        f"{label}simulated {sent} requests and {steps} steps in {outcome.wall_s:.2f} s of wall "
        f"time: {sent / outcome.wall_s:,.0f} requests/s, "
        f"{outcome.wall_s / max(steps, 1) * 1e6:.0f} us per step\n"
    )


def _fail(error: TandemError, code: int) -> int:
    line = " ".join(error.message.split())
    sys.stderr.write(f"simulate: {line}\n")
    return code


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_printing("simulate", main))
