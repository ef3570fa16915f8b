"""
Compares scheduling policies in the simulator and writes `README.md` and `plots/` beside this file:

    python tests/bench/policies/report.py

Takes a few minutes; the same code gives the same files. `--requests` and `--out` are for trying it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from experiments import EXPERIMENTS, Experiment  # noqa: E402  # beside this script
from tables import Cell, comparison_table, run_cells  # noqa: E402  # beside this script

from tandem_simulator.results.plots import draw  # noqa: E402  # after the path is set

NUM_SEEDS = 2
REQUESTS = 300

_HEAD = """\
# Scheduling policies compared

Written by `python tests/bench/policies/report.py`; change that and the files beside it, not this
page. Every number comes from the scheduler core itself, driven by a model of an executor on a
virtual clock (`python -m tandem_simulator`): the decisions are real, the durations are
modelled. The executor is an 8B model on one H100, its step times computed from the data sheet
(`clients/simulator/tandem_simulator/presets.py`), with two steps in flight. Read ratios, not absolute times.

Each row is the mean of {num_seeds} seeds with {requests} requests each. In brackets: the change
against the table's first row, the mean of what each seed's own requests show, with half the distance
between the seeds ("±"); bold where it is better, by 1 % and by more than the seeds differ. Latencies
are milliseconds: TTFT from arrival to the first token, ITL between successive tokens of a request,
preemptions and pauses included, e2e from arrival to the last token. "hit" is the share of prompt tokens
found in the prefix cache at first admission, "recomputed" counts tokens computed more than once.
"good/s" counts requests with a first token within 2 s and 0.1 s per further one. What is said below a
table is checked against its numbers by the script.

Workloads: **shared-prefix**: 64 system prompts of 512 to 2,048 tokens, the popular ones more often,
in bursts of 8; **chat**: conversations of 5 turns behind 8 system prompts, each turn holding
everything before it and following the last answer after a second; **long-tail**: lognormal prompts (mean 600, up to 6,000) and outputs (mean
250, up to 2,048) in gamma-distributed arrivals, all asking for 2,048 tokens; **reasoning**:
short prompts (mean 150) and long outputs (mean 600, up to 4,096), all asking for 4,096 tokens.
Arrival rates are at or over what the machine can do, since below that no policy matters; machine
`h100-8b-tight` has KV memory for 48,000 tokens only, for the same reason.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run every experiment and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--only", help="names of experiments, separated by commas")
    chosen = parser.parse_args(arguments)
    only = chosen.only.split(",") if chosen.only else None
    parts = [_HEAD.format(num_seeds=chosen.seeds, requests=f"{chosen.requests:,}")]
    seeds = range(chosen.seeds)
    parts += [
        _section(experiment, chosen.requests, seeds, chosen.out)
        for experiment in EXPERIMENTS
        if only is None or experiment.name in only
    ]
    (chosen.out / "README.md").write_text("\n".join(parts))
    return 0


def _section(experiment: Experiment, requests: int, seeds: range, out: Path) -> str:
    print(f"{experiment.name} ...", file=sys.stderr, flush=True)
    lines = [f"## {experiment.title}", "", experiment.question, ""]
    cells_of: dict[str, list[Cell]] = {}
    for workload, texts in experiment.workloads.items():
        base = {"workload": workload, "requests": str(requests), **experiment.base, **texts}
        cells = run_cells(base, experiment.variants, seeds)
        cells_of[workload] = cells
        settings = ", ".join(
            f"`{name}={text}`" for name, text in {**experiment.base, **texts}.items()
        )
        lines += [
            f"**{workload}** ({settings})",
            "",
            *comparison_table(cells, experiment.columns),
            "",
        ]
        if workload == experiment.plotted:
            folder = out / "plots" / experiment.name
            shutil.rmtree(folder, ignore_errors=True)
            paths = draw([cell.outcomes[0] for cell in cells], folder)
            lines += [
                f"![{path.stem}, {workload}](plots/{experiment.name}/{path.name})" for path in paths
            ]
            lines.append("")
    for claim in experiment.claims:
        verdict = "" if claim.holds(cells_of) else " **This does not hold for the numbers above.**"
        lines.append(f"- {claim.text}{verdict}")
        if verdict:
            print(f"  does not hold: {claim.text}", file=sys.stderr)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
