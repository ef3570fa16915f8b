"""
`tandem bench scheduler [flags]`: the cost of a decode-only step and of an admission.

A scheduler core runs in this process, without server, executor and frontend. A measured turn is one
step's work of the service's loop: apply the result of a step, plan the next one, encode it for the
executor and encode the frontend's message. Results are made up between turns, which does not count.
Times are CPU microseconds of the thread. Without --json the admission of one long prompt is
measured too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from scheduler_svc.core.request.options import MAX_WINDOW
from tandem_bench.command_line import (
    BenchParser,
    at_least_one,
    at_most,
    count,
    print_line,
    print_row,
)
from tandem_bench.scheduler.admission import AdmissionCosts, measure_admission
from tandem_bench.scheduler.decode_step import StepCosts, measure_decode_step
from tandem_bench.scheduler.service import PARTS

DEFAULT_RUNNING = (1, 32, 128, 256, 1024)
FULL_RUNNING = (*DEFAULT_RUNNING, 4096)
DEFAULT_WAITING = (0, 500, 5000)
DEFAULT_TURNS = 2000

_HEADINGS = ("running", "waiting", "mean us", "median us", "p99 us", "wall median us")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    chosen = _parser().parse_args(arguments)
    running = chosen.running or (FULL_RUNNING if chosen.full else DEFAULT_RUNNING)
    headings = (*_HEADINGS, *(f"{name} us" for name in PARTS if chosen.parts))
    if not chosen.json:
        print_line("One decode-only turn, microseconds of CPU: apply, plan, encode, events out.")
        print_row(headings, headings)
    measured = []
    for num_running in running:
        for num_waiting in chosen.waiting or DEFAULT_WAITING:
            costs = measure_decode_step(
                num_running,
                num_waiting,
                num_turns=chosen.turns,
                window=chosen.window,
                has_parts=chosen.parts,
            )
            measured.append(costs)
            if not chosen.json:
                print_row(_cells(costs), headings)
    if chosen.json:
        print_line(json.dumps([costs.as_json() for costs in measured]))
    else:
        _print_admission(measure_admission())
    return 0


def _parser() -> BenchParser:
    parser = BenchParser("scheduler", __doc__)
    parser.add_list(
        "--running",
        type=at_least_one,
        help="requests that decode; several values: one measurement each; default: 1, 32, 128, 256 "
        "and 1024",
    )
    parser.add_list(
        "--waiting",
        type=count,
        help="requests that wait meanwhile; several values: one measurement each; default: 0, 500 "
        "and 5000",
    )
    parser.add_argument("--full", action="store_true", help="without --running, measure 4096 too")
    parser.add_argument(
        "--turns",
        type=at_least_one,
        default=DEFAULT_TURNS,
        help=f"turns per measurement; default: {DEFAULT_TURNS}",
    )
    parser.add_argument(
        "--window", type=at_most(MAX_WINDOW), default=1, help="steps in flight, 1 to 16; default: 1"
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="median of each part of a turn too; reading the clock for them makes turns dearer",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    return parser


def _cells(costs: StepCosts) -> tuple[str, ...]:
    means = (costs.mean_us, costs.median_us, costs.p99_us, costs.wall_median_us)
    times = (*means, *costs.parts_us.values())
    return str(costs.running), str(costs.waiting), *(f"{time_us:.1f}" for time_us in times)


def _print_admission(costs: AdmissionCosts) -> None:
    print_line("")
    print_line(f"Admitting a prompt of {costs.prompt_len} tokens, median microseconds of CPU:")
    print_line(f"{costs.given_us:10.1f}  submit, plan and encode, block digests given")
    print_line(f"{costs.computed_us:10.1f}  the same, digests computed by the core")
    print_line(f"{costs.hash_us:10.1f}  the digests alone")
