"""
`tandem bench link [flags]`: how long executors wait for their scheduler.

An executor has no model: its steps take a fixed time, as a device's would, and it adds up the time
in which the device is idle although requests run. The scheduler is a core process with its real
loop, session and link. Without clients the requests are made in the core process, and their outputs
are encoded and dropped; with clients the scheduler is a whole service with a frontend, and a reader
process takes the streams. The results are the device's idle time in percent, which is the median of
five spans, the steps of all executors in a second, and the CPU time per step in microseconds, of
the core process and of an executor's. Several executors are to have as many times the steps of one,
as far as the machine has processors for all these processes.

Without options for points, a few of them are measured, and none is begun after 33 s. With several
values of an option, or with --full, every combination is measured.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.core.request.options import MAX_WINDOW
from scheduler_svc.frontend.request.validation import MAX_CHOICES
from tandem_bench.command_line import (
    BenchParser,
    at_least_one,
    at_most,
    count,
    time_above_zero,
)
from tandem_bench.link.points import Row, Table, measure_points
from tandem_bench.link.processes import (
    BenchFailed,
    Core,
    CoreAlone,
    CoreWithClients,
    FixedStepExecutors,
    cpu_ns,
)

STEPS_MS = (0.6, 1.0, 2.0, 5.0, 20.0)
ROWS = (1, 32, 256, 1024)
WINDOWS = (1, 2, 4)
TRANSPORTS = ("unix", "tcp")
CLIENTS = (0, 256)

TIME_LIMIT_S = 33.0
"""Seconds after which none of `MAIN_POINTS` is begun."""
_SETTLE_S = 0.3
_NUM_SPANS = 5
_STEADY_SHARE = 0.99
"""Least share of rows in the measured steps; it would be 1 with every request in each step."""

_TABLE = Table(
    name="link",
    title="A device's time without work while requests run, and the scheduler's CPU.",
    headings={
        "step_ms": "step ms",
        "rows": "rows",
        "window": "window",
        "transport": "transport",
        "clients": "clients",
        "executors": "executors",
        "steps_per_s": "steps/s",
        "idle_percent": "idle %",
        "scheduler_cpu_us": "scheduler us",
        "executor_cpu_us": "executor us",
    },
)


@dataclass(frozen=True, slots=True)
class Point:
    """
    One point to measure.

    Attributes:
        step_ms: Duration of a step, in milliseconds.
        rows: Number of rows that decode on each executor.
        window: Steps in flight: 1 and 2 set the scheduler's `window`; more set its `run_ahead`,
            with a `window` of 2.
        transport: Socket of the step link, "unix" or "tcp".
        clients: Number of client streams for each executor; 0 for no frontend at all.
        executors: Number of executors.
    """

    step_ms: float
    rows: int
    window: int
    transport: str
    clients: int
    executors: int = 1

    @property
    def in_words(self) -> str:
        """Description in one line, for messages."""
        executors = "" if self.executors == 1 else f", {self.executors} executors"
        return (
            f"{self.step_ms:g} ms, {self.rows} rows, window {self.window}, {self.transport}, "
            f"{self.clients} clients{executors}"
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """
    Result of one point.

    Attributes:
        point: Point that was measured.
        idle_percent: Percentage of the time, while requests ran, in which the devices had nothing
            to do; median of several spans.
        steps_per_s: Steps of all executors in a second.
        scheduler_cpu_us: CPU time of all threads of the core process, microseconds per step.
        executor_cpu_us: The same of an executor's process.
    """

    point: Point
    idle_percent: float
    steps_per_s: float
    scheduler_cpu_us: float
    executor_cpu_us: float

    def as_json(self) -> dict[str, int | float | str]:
        """Return the row for `--json`."""
        point = self.point
        return {
            "step_ms": point.step_ms,
            "rows": point.rows,
            "window": point.window,
            "transport": point.transport,
            "clients": point.clients,
            "executors": point.executors,
            "steps_per_s": round(self.steps_per_s),
            "idle_percent": round(self.idle_percent, 2),
            "scheduler_cpu_us": round(self.scheduler_cpu_us, 1),
            "executor_cpu_us": round(self.executor_cpu_us, 1),
        }


MAIN_POINTS = (
    Point(2.0, 256, 2, "unix", 0),
    Point(2.0, 256, 4, "unix", 0),
    Point(0.6, 256, 2, "unix", 0),
    Point(0.6, 256, 4, "unix", 0),
    Point(2.0, 256, 2, "unix", 256),
    Point(2.0, 256, 4, "unix", 256),
    Point(2.0, 256, 1, "unix", 0),
    Point(0.6, 256, 4, "tcp", 0),
)
"""Points that are measured without flags, most important first."""


def measure(point: Point, *, seconds: float) -> Costs:
    """
    Start the processes of a point and measure once all its rows decode.

    Raises:
        BenchFailed: Not all rows came to decode, or some ended while they were measured.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        directory = Path(name)
        executors = FixedStepExecutors(
            point.executors, point.step_ms, point.rows, point.transport, directory
        )
        try:
            core = _start_core(point, executors, directory)
            try:
                executors.wait_for_rows(point.rows)
                time.sleep(_SETTLE_S)
                return _measure(point, executors, core, seconds)
            finally:
                core.close()
        finally:
            executors.close()


def _start_core(point: Point, executors: FixedStepExecutors, directory: Path) -> Core:
    window, run_ahead = min(point.window, 2), point.window
    if point.clients == 0:
        return CoreAlone(executors, point.rows, window, run_ahead, directory=directory)
    return CoreWithClients(
        executors, point.rows, window, run_ahead, clients=point.clients, directory=directory
    )


def _measure(point: Point, executors: FixedStepExecutors, core: Core, seconds: float) -> Costs:
    core_before_ns, executors_before_ns = cpu_ns(core.pid), executors.cpu_ns()
    first, began_s = executors.report(), time.monotonic()
    idle_percents, before = [], first
    for _ in range(_NUM_SPANS):
        time.sleep(seconds / _NUM_SPANS)
        after = executors.report()
        idle_ns = after["idle_ns"] - before["idle_ns"]
        busy_ns = after["busy_ns"] - before["busy_ns"]
        idle_percents.append(100 * idle_ns / max(1, idle_ns + busy_ns))
        before = after
    core_ns, executors_ns = cpu_ns(core.pid), executors.cpu_ns()
    spent_s = time.monotonic() - began_s
    num_steps = before["steps"] - first["steps"]
    if num_steps == 0:
        raise BenchFailed("no step was computed while it was measured")
    # Requests that have ended keep no device waiting, so that it would seem to be never idle.
    if before["rows"] - first["rows"] < _STEADY_SHARE * point.rows * num_steps:
        raise BenchFailed("requests ended while it was measured: choose fewer --seconds")
    core.check()
    return Costs(
        point=point,
        idle_percent=statistics.median(idle_percents),
        steps_per_s=num_steps / spent_s,
        scheduler_cpu_us=(core_ns - core_before_ns) / num_steps / 1e3,
        executor_cpu_us=(executors_ns - executors_before_ns) / num_steps / 1e3,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code, as `measure_points` does."""
    given = _parser().parse_args(arguments)
    points = _chosen(given)

    def row_of(point: Point) -> Row:
        return measure(point, seconds=given.seconds).as_json()

    return measure_points(
        _TABLE,
        points,
        row_of,
        as_json=given.json,
        time_limit_s=TIME_LIMIT_S if points is MAIN_POINTS else None,
    )


def _chosen(given: argparse.Namespace) -> Sequence[Point]:
    if not given.full and not (
        given.step_ms
        or given.rows
        or given.window
        or given.transport
        or given.clients
        or given.executors
    ):
        return MAIN_POINTS
    points = list(_points(given))
    if any(point.clients and point.rows > MAX_CHOICES * point.clients for point in points):
        _parser().error(f"--clients: none can have more than {MAX_CHOICES} of the --rows")
    return points


def _points(given: argparse.Namespace) -> Iterator[Point]:
    """Yield all combinations once; clients are reduced until they divide the rows evenly."""
    is_wide: bool = given.full
    seen = set()
    for step_ms, num_rows, window, transport, most_clients, num_executors in itertools.product(
        given.step_ms or (STEPS_MS if is_wide else (2.0,)),
        given.rows or (ROWS if is_wide else (256,)),
        given.window or (WINDOWS if is_wide else (2,)),
        given.transport or (TRANSPORTS if is_wide else ("unix",)),
        given.clients or (CLIENTS if is_wide else (0,)),
        given.executors or (1,),
    ):
        num_clients = min(num_rows, most_clients)
        while num_clients and num_rows % num_clients:
            num_clients -= 1
        point = Point(step_ms, num_rows, window, transport, num_clients, num_executors)
        if point not in seen:
            seen.add(point)
            yield point


def _parser() -> BenchParser:
    parser = BenchParser("link", __doc__)
    parser.add_list(
        "--step-ms", type=time_above_zero, help="duration of a step in milliseconds; default: 2"
    )
    parser.add_list(
        "--rows", type=at_least_one, help="rows that decode on each executor; default: 256"
    )
    parser.add_list(
        "--window",
        type=at_most(MAX_WINDOW),
        help="steps in flight, 1 to 16; above 2, `window` is 2 and `run_ahead` this; default: 2",
    )
    parser.add_list(
        "--transport", choices=TRANSPORTS, help="socket of the step link; default: unix"
    )
    parser.add_list(
        "--clients",
        type=count,
        help="client streams for each executor, which share its rows evenly; 0 for no frontend; "
        "default: 0",
    )
    parser.add_list(
        "--executors", type=at_least_one, help="executors that serve together; default: 1"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="several values for each option that is not given; takes minutes",
    )
    parser.add_argument(
        "--seconds",
        type=time_above_zero,
        default=1.0,
        help="seconds for each measurement; default: 1",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    return parser
