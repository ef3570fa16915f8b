"""
`python -m tests.bench.gateway`: tokens per second through the gateway, over those of gRPC directly.

One scheduler service and one executor serve both: by default a real executor with the bundled model,
one thread and float32; with --step-ms one without a model, whose steps take that long. All streams
are read at once, first directly, then through a gateway, in turn, and the first turn of each is
not counted. Two gateways are measured: `each` sends a chunk for every delta (--min-delta-interval-s
0), `default` joins deltas under load as it does by default. Each turn's reader is a process of its
own (`raw_reader`), which decodes nothing while time is taken. No process is bound to a core: the
executor, the scheduler's processes, the gateway and the reader share this machine's, so that what
the gateway costs is taken from the others. The line says the CPU µs per token of each; the
scheduler's are those of its core and its frontends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.gateway.reading import cpu_s, read
from tests.bench.machine import machine
from tests.e2e.cluster import BUNDLED_MODEL, PATIENCE, Process

DIRECT = "grpc"
GATEWAYS = {"each": ["--min-delta-interval-s=0"], "default": list[str]()}
"""Flags of the gateways."""
READY_WITHIN_S = 120.0


def wait_until_ready(address: str) -> None:
    """Wait until the gateway's scheduler serves requests."""
    end_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"http://{address}/health"):
                return
        except urllib.error.HTTPError:
            time.sleep(0.1)
    raise RuntimeError("the scheduler serves no requests")


def start_executor(start: Callable[..., Process], step_ms: float | None, streams: int) -> Process:
    """Start the bundled model, or steps that take a fixed time."""
    if step_ms is None:
        model = [f"--model={BUNDLED_MODEL}", "--dtype=float32", "--num-threads=1"]
        return start("executor_svc", "--listen=127.0.0.1:0", *model, f"--max-batch-size={streams}")
    rows = [f"--rows={streams}", "--max-num-blocks=16384", f"--step-ms={step_ms}"]
    return start("tandem_bench.fixed_step", "--listen=127.0.0.1:0", *rows)


def compare(folder: Path, step_ms: float | None, given: argparse.Namespace) -> dict[str, Any]:
    """Start the processes, measure all ways in turn, and return the medians."""
    with ExitStack() as stack:

        def start(module: str, *arguments: str) -> Process:
            process = Process(module, list(arguments), folder, f"{module}-{step_ms}")
            stack.callback(process.end)
            return process

        executor = start_executor(start, step_ms, given.streams)
        scheduler = start(
            "scheduler_svc",
            f"--executor={executor.addresses()['address']}",
            f"--max-batch-size={given.streams}",
            *(f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")),
            *PATIENCE,
        )
        address = scheduler.addresses()["address"]
        addresses, gateways = {DIRECT: address}, dict[str, Process]()
        for name, flags in GATEWAYS.items():
            gateways[name] = start(
                "tandem_openai_gateway", f"--scheduler={address}", "--listen=127.0.0.1:0", *flags
            )
            addresses[name] = gateways[name].addresses()["address"]
            wait_until_ready(addresses[name])
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in addresses}
        for _ in range(1 + given.rounds):
            for way, at in addresses.items():
                processes = {"executor": executor, "scheduler": scheduler}
                if way != DIRECT:
                    processes["gateway"] = gateways[way]
                before_s = {name: cpu_s(one) for name, one in processes.items()}
                found = read("grpc" if way == DIRECT else "http", at, given.streams, given.tokens)
                used_s = {name: cpu_s(one) - before_s[name] for name, one in processes.items()}
                turns[way].append(figures(found, used_s, given.streams * given.tokens))
    return summary({way: found[1:] for way, found in turns.items()})


def figures(found: dict[str, float], used_s: dict[str, float], tokens: int) -> dict[str, float]:
    """Return the figures of one turn: CPU µs per token of each process, and rates."""
    used_s = used_s | {"reader": found["cpu_s"]}
    return {
        "tokens_per_s": tokens / found["took_s"],
        "tokens_per_message": tokens / found["messages"],
        **{f"{name}_us": seconds / tokens * 1e6 for name, seconds in used_s.items()},
    }


def summary(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """
    Return the medians of all turns, and for gateways the ratio to gRPC: of the medians, and of each
    round.
    """
    told: dict[str, Any] = {}
    for way, found in turns.items():
        medians = {name: statistics.median(turn[name] for turn in found) for name in found[0]}
        told[way] = {name: round(value, 1) for name, value in medians.items()}
        rates = [turn["tokens_per_s"] for turn in found]
        if way == DIRECT:
            direct, direct_rates = medians["tokens_per_s"], rates
            continue
        told[way]["ratio"] = round(medians["tokens_per_s"] / direct, 3)
        ratios = [round(b / a, 3) for a, b in zip(direct_rates, rates, strict=True)]
        told[way]["ratios"] = sorted(ratios)
    return told


def main() -> None:
    """Measure with the model, or with several durations of a step, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams at a time; default: 64")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a stream; default: 128")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all; default: 5")
    parser.add_argument(
        "--step-ms", type=float, nargs="+", default=[None], help="steps without a model"
    )
    given = parser.parse_args()
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]}))
    for step_ms in given.step_ms:
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            found = compare(Path(folder), step_ms, given)
            print(json.dumps({"step_ms": step_ms, "streams": given.streams} | found), flush=True)


if __name__ == "__main__":
    main()
