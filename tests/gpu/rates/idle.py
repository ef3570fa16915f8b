"""
`python -m tests.gpu.rates.idle`: how much of its time a device has nothing to do while requests decode, through both services and
gRPC. Prints a JSON list of one row.

Busy is what the executor reports of its steps, added up by the scheduler; what is left of the clock's time is idle. A step's time begins
where the host launches it, so that the launch itself counts as busy, while what the host does before it, and copies of inputs, count
as idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.process.printing_commands import end_by_signals
from tests.gpu.rates.offline import write_model
from tests.gpu.rates.services import (
    Services,
    bench_serve,
    metric_lines,
    metric_sum,
    services_parser,
)
from tests.waiting import wait_until

_BUSY = ("tandem_executor_forward_time_seconds_sum", "tandem_executor_sample_time_seconds_sum")
_STEPS = "tandem_executor_forward_time_seconds_count"
_TOKENS = "tandem_generation_tokens_total"
_RUNNING = "tandem_requests_running"
_PROMPT_LEN = 32
_MOST_S = 200
_LOOK_S = 0.5
"""Seconds between looks: a page of metrics takes the scheduler time that steps would wait for."""
_ROUNDS = 10_000
"""
Multiple of the requests that run at once: no machine is through with them before they are looked
at.
"""


def main() -> int:
    """Measure and print."""
    given = _parser().parse_args()
    output_len = 40 if given.tiny else 1600
    model = write_model(given.models, tiny=given.tiny)
    with (
        tempfile.TemporaryDirectory(prefix="idle-") as name,
        Services(
            Path(name),
            model,
            given.device,
            rows=given.rows,
            longest=_PROMPT_LEN + output_len,
            scheduler=[f"--window={given.window}"],
        ) as services,
    ):
        row = _under_load(given, services, output_len)
    sys.stdout.write(json.dumps([row]) + "\n")
    return 0


def _under_load(given: argparse.Namespace, services: Services, output_len: int) -> dict[str, Any]:
    """
    Let all rows decode, and take the difference of two looks at what was added up. Requests that end are followed by others, so
    that there are always as many.
    """
    metrics = services.metrics_address
    command = bench_serve(
        services.address,
        concurrency=given.rows,
        requests=given.rows * _ROUNDS,
        input_len=_PROMPT_LEN,
        output_len=output_len,
        max_time_s=_MOST_S,
        more=["--warm-up=0"],
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
        try:
            wait_until(
                lambda: metric_sum(metric_lines(metrics), _RUNNING) >= given.rows,
                "rows to run",
                every_s=_LOOK_S,
            )
            before = Totals.at(metrics)
            wait_until(
                lambda: (
                    load.poll() is not None
                    or metric_sum(metric_lines(metrics), _STEPS) - before.steps >= given.steps
                ),
                "steps to measure",
                every_s=_LOOK_S,
            )
            after = Totals.at(metrics)
            if load.poll() is not None:
                raise SystemExit("the requests were over before enough steps were measured")
        finally:
            load.terminate()
    return {"rows": given.rows, **between(before, after)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals that were added up until a moment."""

    at_s: float
    steps: float
    tokens: float
    busy_s: float

    @classmethod
    def at(cls, metrics: str) -> Totals:
        lines = metric_lines(metrics)
        return cls(
            at_s=time.monotonic(),
            steps=metric_sum(lines, _STEPS),
            tokens=metric_sum(lines, _TOKENS),
            busy_s=sum(metric_sum(lines, name) for name in _BUSY),
        )


def between(before: Totals, after: Totals) -> dict[str, float]:
    """
    Return what steps did between two looks. More time than the clock's gives a share below 0, which
    says that the steps' times overlap and prove nothing.
    """
    num_steps, wall_s = after.steps - before.steps, after.at_s - before.at_s
    return {
        "rows_per_step": (after.tokens - before.tokens) / num_steps,
        "steps": int(num_steps),
        "step_ms": 1e3 * wall_s / num_steps,
        "idle_percent": 100 * (1 - (after.busy_s - before.busy_s) / wall_s),
    }


def _parser() -> argparse.ArgumentParser:
    parser = services_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64, help="requests that decode")
    parser.add_argument("--steps", type=int, default=1000, help="to measure")
    parser.add_argument("--window", type=int, default=1, help="steps in flight")
    return parser


if __name__ == "__main__":
    end_by_signals()  # so that what it started is ended too
    sys.exit(main())
