"""
`python -m tests.gpu.rates.idle`: how much of its time a device has nothing to do while requests decode, through both services and
gRPC. Prints a JSON list of one row.

Busy is what the executor reports of its steps, added up by the scheduler; what is left of the clock's time is idle.
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
from urllib.request import ProxyHandler, build_opener

from tandem.process.printing_commands import end_by_signals
from tests.e2e.cluster import Process
from tests.gpu.rates.offline import write_model
from tests.waiting import wait_until

_BLOCK_SIZE = 16
_BUSY = ("tandem_executor_forward_time_seconds_sum", "tandem_executor_sample_time_seconds_sum")
_STEPS = "tandem_executor_forward_time_seconds_count"
_TOKENS = "tandem_generation_tokens_total"
_RUNNING = "tandem_requests_running"
_LOGGED_CHARACTERS = 8000
_ROUNDS = 10_000
"""
Multiple of the requests that run at once: no machine is through with them before they are looked
at.
"""


def main() -> int:
    """Measure and print."""
    given = _parser().parse_args()
    output_len = 40 if given.tiny else 1600
    with tempfile.TemporaryDirectory(prefix="idle-") as name:
        sys.stdout.write(json.dumps([_measure(given, Path(name), output_len)]) + "\n")
    return 0


def _measure(given: argparse.Namespace, folder: Path, output_len: int) -> dict[str, Any]:
    longest = 32 + output_len
    limits = [f"--max-batch-size={given.rows}", f"--max-model-len={longest + _BLOCK_SIZE}"]
    executor = Process(
        "executor_svc",
        [
            f"--model={write_model(given.models, tiny=given.tiny)}",
            f"--device={given.device}",
            "--dtype=bfloat16",
            f"--max-num-blocks={given.rows * (longest // _BLOCK_SIZE + 2)}",
            f"--block-size={_BLOCK_SIZE}",
            f"--listen=unix:{folder}/executor.sock",
            *limits,
        ],
        folder,
        "executor",
    )
    scheduler = None
    try:
        address = executor.addresses()["address"]
        ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")]
        scheduler = Process(
            "scheduler_svc",
            [f"--executor={address}", *ports, f"--window={given.window}"],
            folder,
            "scheduler",
        )
        found = scheduler.addresses()
        return _under_load(given, found["address"], found["metrics_address"], output_len)
    except (AssertionError, OSError, SystemExit):
        for log in sorted(folder.glob("*.log")):  # they go with the folder
            sys.stderr.write(f"{log.name}:\n{log.read_text()[-_LOGGED_CHARACTERS:]}\n")
        raise
    finally:
        if scheduler is not None:
            scheduler.end()
        executor.end()


def _under_load(
    given: argparse.Namespace, address: str, metrics: str, output_len: int
) -> dict[str, Any]:
    """
    Let all rows decode, and take the difference of two looks at what was added up. Requests that end are followed by others, so
    that there are always as many.
    """
    flags = ["--address", address, "--concurrency", str(given.rows), "--input-len", "32"]
    flags += ["--requests", str(given.rows * _ROUNDS), "--output-len", str(output_len)]
    flags += ["--processes", str(min(8, given.rows)), "--warm-up", "0", "--max-time-s", "200"]
    command = [sys.executable, "-m", "tandem_client", "bench", "serve", *flags, "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
        try:
            wait_until(lambda: _read(metrics, _RUNNING) >= given.rows, "rows to run")
            before = _Look.at(metrics)
            wait_until(
                lambda: (
                    load.poll() is not None or _read(metrics, _STEPS) - before.steps >= given.steps
                ),
                "steps to measure",
            )
            after = _Look.at(metrics)
            if load.poll() is not None:
                raise SystemExit("the requests were over before enough steps were measured")
        finally:
            load.terminate()
    num_steps, wall_s = after.steps - before.steps, after.at_s - before.at_s
    return {
        "rows": given.rows,
        "rows_per_step": (after.tokens - before.tokens) / num_steps,
        "steps": int(num_steps),
        "step_ms": 1e3 * wall_s / num_steps,
        "idle_percent": 100 * max(0.0, 1 - (after.busy_s - before.busy_s) / wall_s),
    }


@dataclass(frozen=True)
class _Look:
    """Totals that were added up until a moment."""

    at_s: float
    steps: float
    tokens: float
    busy_s: float

    @classmethod
    def at(cls, metrics: str) -> _Look:
        lines = _lines(metrics)
        return cls(
            at_s=time.monotonic(),
            steps=_sum(lines, _STEPS),
            tokens=_sum(lines, _TOKENS),
            busy_s=sum(_sum(lines, name) for name in _BUSY),
        )


def _read(address: str, name: str) -> float:
    """Return a sample of the metrics, 0 where it is not there yet."""
    return _sum(_lines(address), name)


def _lines(address: str) -> list[str]:
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=60) as answer:
        return answer.read().decode().splitlines()


def _sum(lines: list[str], name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--rows", type=int, default=64, help="requests that decode")
    parser.add_argument("--steps", type=int, default=1000, help="to measure")
    parser.add_argument("--window", type=int, default=1, help="steps in flight")
    parser.add_argument("--models", type=Path, help="where random weights are kept")
    return parser


if __name__ == "__main__":
    end_by_signals()  # so that what it started is ended too
    sys.exit(main())
