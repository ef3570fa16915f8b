"""
`python -m tests.bench.multiplexing`: requests as items of one GenerateBatch ÷ streams of their own.

One scheduler service and an executor without a model, whose steps take a fixed time, serve both in
turn. One reader process reads either, by the same code, on one connection; all processes share this
machine's cores. CPU is that of the whole scheduler service, and that of its frontend alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tandem_bench.link.processes import FixedStepExecutor
from tandem_bench.link.requests import generate_requests
from tandem_bench.reader import Reader
from tandem_bench.stream.command import MOST_PER_MS
from tandem_bench.stream.service import StreamService
from tests.bench.machine import machine

WAYS = {"streams": [], "batch": ["batch"]}
FIGURES = (
    "tokens_per_s",
    "cpu_us_per_token",
    "frontend_us_per_token",
    "messages_per_s",
    "deltas_per_s",
)
LIMIT_S = 120.0
SETTLE_S = 0.5


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Poll until it is so."""
    give_up_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.02)


def is_idle(executor: FixedStepExecutor) -> bool:
    """Return True if no step with rows ran in a short while."""
    rows = executor.report()["rows"]
    time.sleep(SETTLE_S)
    return executor.report()["rows"] == rows


def measure(
    way: str, service: StreamService, executor: FixedStepExecutor, items: int, seconds: float
) -> dict[str, float]:
    """Return tokens per second, and microseconds of CPU per token, of one round."""
    command = [sys.executable, "-m", "tandem_bench.reader.reader_process", service.address, "1"]
    requests = generate_requests(items, 1)
    with Reader([*command, *WAYS[way]], requests, num_processes=1) as reader:
        wait_until(lambda: reader.report().started == items, f"{way}: all requests started")
        time.sleep(SETTLE_S)
        before, used = reader.report(), service.usage()
        time.sleep(seconds)
        after, used_after = reader.report(), service.usage()
    wait_until(lambda: is_idle(executor), f"{way}: all requests ended")
    assert after.failed + after.bad_offsets + after.malformed == 0, after
    tokens = after.tokens - before.tokens
    frontend_us = (used_after.frontend_cpu_ns - used.frontend_cpu_ns) / 1e3
    core_us = (used_after.core_cpu_ns - used.core_cpu_ns) / 1e3
    return {
        "tokens_per_s": tokens / (after.time_s - before.time_s),
        "cpu_us_per_token": (core_us + frontend_us) / tokens,
        "frontend_us_per_token": frontend_us / tokens,
        "messages_per_s": (after.messages - before.messages) / (after.time_s - before.time_s),
        "deltas_per_s": (after.deltas - before.deltas) / (after.time_s - before.time_s),
    }


def compare(items: int, given: argparse.Namespace) -> dict[str, object]:
    """Measure both ways in turn and return medians, and the median of the ratios of neighbours."""
    step_ms = given.step_ms or max(1.0, items / MOST_PER_MS)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        folder = Path(name)
        with (
            FixedStepExecutor(step_ms, items, "unix", folder) as executor,
            StreamService(executor, items, 1, folder) as service,
        ):
            for turn in range(given.rounds):
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    found[way].append(measure(way, service, executor, items, given.seconds))
    row: dict[str, object] = {"items": items, "step_ms": step_ms}
    for figure in FIGURES:
        pairs = [
            (batch[figure], streams[figure])
            for batch, streams in zip(found["batch"], found["streams"], strict=True)
        ]
        row[figure] = {
            "batch": round(statistics.median(batch for batch, _ in pairs), 2),
            "streams": round(statistics.median(streams for _, streams in pairs), 2),
            "ratio": round(statistics.median(batch / streams for batch, streams in pairs), 3),
        }
    return row


def main() -> None:
    """Measure each number of items, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both ways; default: 5")
    parser.add_argument("--seconds", type=float, default=3.0, help="per round; default: 3")
    parser.add_argument("--step-ms", type=float, help="default: 256 tokens a millisecond at most")
    given = parser.parse_args()
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]}), flush=True)
    for items in given.items:
        print(json.dumps(compare(items, given)), flush=True)


if __name__ == "__main__":
    main()
