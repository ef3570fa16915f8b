"""
`python -m tests.gpu.idle`: how much of its time a device has nothing to do while requests decode, through both services and
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
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from tests.e2e.cluster import Process, wait_until
from tests.gpu.offline import write_model

_BLOCK_SIZE = 16
_BUSY = ("tandem_executor_forward_time_seconds_sum", "tandem_executor_sample_time_seconds_sum")
_STEPS = "tandem_executor_forward_time_seconds_count"


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
    finally:
        if scheduler is not None:
            scheduler.end()
        executor.end()


def _under_load(
    given: argparse.Namespace, address: str, metrics: str, output_len: int
) -> dict[str, Any]:
    """Let all rows decode, and take the difference of two looks at what was added up."""
    flags = ["--address", address, "--requests", str(given.rows), "--concurrency", str(given.rows)]
    flags += ["--input-len", "32", "--output-len", str(output_len), "--max-time-s", "200"]
    flags += ["--processes", str(min(8, given.rows)), "--warm-up", "0", "--json"]
    command = [sys.executable, "-m", "tandem_client", "bench", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
        wait_until(lambda: _read(metrics, _STEPS) >= given.settle_steps, "steps of all rows")
        before_s, started_s, first_step = _busy_s(metrics), time.monotonic(), _read(metrics, _STEPS)
        wait_until(
            lambda: _read(metrics, _STEPS) - first_step >= given.steps, "steps to measure", 120.0
        )
        busy_s, wall_s = _busy_s(metrics) - before_s, time.monotonic() - started_s
        num_steps = _read(metrics, _STEPS) - first_step
        answered = json.loads(load.communicate()[0])
    if answered["errors"] or answered["requests"] != given.rows:
        raise SystemExit(f"not all requests were answered: {answered}")
    return {
        "rows": given.rows,
        "steps": int(num_steps),
        "step_ms": 1e3 * wall_s / num_steps,
        "idle_percent": 100 * max(0.0, 1 - busy_s / wall_s),
    }


def _busy_s(address: str) -> float:
    return sum(_read(address, name) for name in _BUSY)


def _read(address: str, name: str) -> float:
    """A sample of the metrics, 0 where it is not there yet."""
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--rows", type=int, default=64, help="requests that decode")
    parser.add_argument("--settle-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000, help="to measure")
    parser.add_argument("--window", type=int, default=1, help="steps in flight")
    parser.add_argument("--models", type=Path, help="where random weights are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
