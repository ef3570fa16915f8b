"""
Cost of the split and worth of the engine: gRPC path, embedded engine and transformers in one run.

`python -m tests.bench.serving` serves the same greedy requests with all three, in turn, several rounds; over gRPC
twice, each request as a call of its own and all as items of one GenerateBatch call, as `generate_many` sends them. The
executor (or the whole embedded engine, or transformers) runs on core 0 with one thread, everything else (scheduler,
frontend, load generator) on core 1. All but transformers serve as many other requests before those that are timed:
where a virtual machine gets its memory from the host only as it is touched, the first touch of the KV memory takes
seconds, and whichever engine starts first pays them. Prints a table, or with --json only JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
COMPUTE_CORE, OTHER_CORE = "0", "1"
PYTHON = sys.executable


def pinned(core: str, *arguments: str) -> list[str]:
    """Return a command bound to one core."""
    return ["taskset", "-c", core, PYTHON, "-m", *arguments]


def last_json(command: list[str]) -> dict[str, Any]:
    """Run a command and return the JSON in the last line of its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    outcome = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{outcome.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(outcome.stdout.strip().splitlines()[-1])
    return result


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Wait until a service wrote its ready file."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if path.exists():
            content: dict[str, Any] = json.loads(path.read_text())
            return content
        if process.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit(f"a service did not start:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def services(arguments: argparse.Namespace) -> Iterator[str]:
    """Executor on the compute core and scheduler on the other; yields the public address."""
    with tempfile.TemporaryDirectory() as directory_name, contextlib.ExitStack() as stack:
        directory = Path(directory_name)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

        def start(name: str, command: list[str]) -> dict[str, Any]:
            log = directory / f"{name}.log"
            ready = directory / f"{name}.json"
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                [*command, "--ready-file", str(ready)],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return wait_for(ready, process, log)

        limits = ["--max-batch-size", str(arguments.concurrency)]
        model = ["--model", str(arguments.model), "--dtype", arguments.dtype, "--num-threads", "1"]
        executor = start(
            "executor",
            pinned(COMPUTE_CORE, "executor_svc", *model, *limits, "--listen", "127.0.0.1:0"),
        )
        ports = [
            "--listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
            "--metrics-listen",
            "127.0.0.1:0",
        ]
        link = ["--executor", executor["address"], "--window", str(arguments.window)]
        scheduler = start("scheduler", pinned(OTHER_CORE, "scheduler_svc", *limits, *link, *ports))
        yield scheduler["address"]


def run_grpc(arguments: argparse.Namespace, *options: str) -> float:
    """Return tokens per second through client, scheduler and executor."""
    with services(arguments) as address:
        load = [
            *(
                "bench",
                "serve",
                "--address",
                address,
                "--json",
                "--requests",
                str(arguments.requests),
            ),
            *("--concurrency", str(arguments.concurrency), "--processes", "1"),
            *("--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len)),
            *options,
        ]
        # The first run, of other prompts, touches the memory that the second uses.
        for seed in ("1", "0"):
            result = last_json(pinned(OTHER_CORE, "tandem_client", *load, "--seed", seed))
            if result["errors"]:
                sys.exit(f"{result['errors']} requests failed")
    return float(result["output_tokens_per_s"])


def run_contestant(arguments: argparse.Namespace, module: str) -> float:
    """Return tokens per second of one in-process engine."""
    workload = {
        "num_requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
    }
    options = ["--model", str(arguments.model), "--dtype", arguments.dtype]
    command = pinned(COMPUTE_CORE, f"tests.bench.serving.{module}", *options)
    return float(last_json([*command, "--workload", json.dumps(workload)])["output_tokens_per_s"])


CONTESTANTS: dict[str, Callable[[argparse.Namespace], float]] = {
    "embedded": lambda arguments: run_contestant(arguments, "run_embedded"),
    "grpc": run_grpc,
    "grpc_batch": lambda arguments: run_grpc(arguments, "--batch"),
    "transformers": lambda arguments: run_contestant(arguments, "run_transformers"),
}


def main() -> None:
    """Run the rounds and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "deploy/models/tandem-py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(arguments.rounds):
        for name, run in CONTESTANTS.items():
            rounds[name].append(run(arguments))
    outcome: dict[str, Any] = {
        "output_tokens_per_s": {name: statistics.median(values) for name, values in rounds.items()},
        "rounds": rounds,
    }
    for way in ("grpc", "grpc_batch"):
        for other in ("embedded", "transformers"):
            pairs = zip(rounds[way], rounds[other], strict=True)
            outcome[f"{way}_over_{other}"] = statistics.median(one / two for one, two in pairs)
    if arguments.json:
        print(json.dumps(outcome))
        return
    for name, tokens_per_s in outcome["output_tokens_per_s"].items():
        print(f"{name:14} {tokens_per_s:9.0f} output tokens/s (median of {arguments.rounds})")
    for way in ("grpc", "grpc_batch"):
        for other in ("embedded", "transformers"):
            print(f"{f'{way} / {other}':27} {outcome[f'{way}_over_{other}']:.2f}")


if __name__ == "__main__":
    main()
