"""
`python -m tests.bench.clients`: CPU that a client of each language takes for a received token, and
the rate of a load program in Go against that of the reader of `tandem bench stream`.

One scheduler service with one frontend and an executor without a model, whose steps take a fixed
time, serve all in turn; everything shares this machine's cores. The CPU of a client is that of its
program of clients/conformance, which keeps all ids, after a stream that warms it up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tandem_bench.link.processes import FixedStepExecutor
from tandem_bench.link.requests import generate_requests
from tandem_bench.reader import Reader
from tandem_bench.stream.service import StreamService
from tests.bench.machine import machine
from tests.bench.multiplexing.__main__ import SETTLE_S, is_idle, wait_until
from tests.clients.conformance.player import Player
from tests.clients.conformance.programs import PROGRAMS, ROOT, Program

NUM_STREAMS, NUM_TOKENS = 64, 1000
NUM_LOAD_STREAMS, NUM_CONNECTIONS = 256, 8
LOAD_PROGRAM = ROOT / "clients/go/bin/load"


@contextmanager
def services(step_ms: float, streams: int) -> Iterator[tuple[FixedStepExecutor, StreamService]]:
    """Yield an executor and a scheduler service with one frontend."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        folder = Path(name)
        with (
            FixedStepExecutor(step_ms, streams, "unix", folder) as executor,
            StreamService(executor, streams, 1, folder) as service,
        ):
            yield executor, service


def cpu_s(player: Player) -> float:
    """Return the seconds of CPU that a program has used."""
    used = psutil.Process(player.pid).cpu_times()
    return float(used.user + used.system)


def us_per_token(program: Program, service: StreamService, folder: Path) -> float:
    """Return microseconds of the program's CPU for each token that its streams received."""
    player = Player(program, folder)

    def play(streams: int) -> None:
        begun = [player.begin(**command(number, service.address)) for number in range(streams)]
        for one in begun:
            result = one.result()
            assert "error" not in result, result
            assert NUM_TOKENS == result["output_tokens"], result

    play(1)
    before_s = cpu_s(player)
    play(NUM_STREAMS)
    used_s = cpu_s(player) - before_s
    assert 0 == player.close()
    return used_s * 1e6 / (NUM_STREAMS * NUM_TOKENS)


def command(number: int, address: str) -> dict[str, Any]:
    """Return a stream of ids over the connection that all streams of a program share."""
    return {
        "do": "generate",
        "targets": [address],
        "connection": "bench",
        "request": {
            "token_ids": {"ids": [3 + (number + at) % 4000 for at in range(64)]},
            "sampling": {"temperature": 1, "seed": str(number)},
            "stopping": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
        },
    }


def load_rate(service: StreamService, seconds: float) -> dict[str, float]:
    """Return what the load program in Go received."""
    flags = {
        "targets": service.address,
        "streams": NUM_LOAD_STREAMS,
        "connections": NUM_CONNECTIONS,
        "seconds": seconds,
        "warm-up": SETTLE_S,
    }
    line = subprocess.run(
        [str(LOAD_PROGRAM), *(f"-{name}={value}" for name, value in flags.items())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(line)
    assert 0 == found["failed"], found
    return {
        "tokens_per_s": found["tokens_per_s"],
        "us_per_token": found["cpu_s"] * 1e6 / found["tokens"],
    }


def reader_rate(service: StreamService, seconds: float) -> dict[str, float]:
    """Return what the reader of `tandem bench stream` received, and its CPU."""
    reads = [sys.executable, "-m", "tandem_bench.reader.reader_process", service.address]
    requests = generate_requests(NUM_LOAD_STREAMS, 1)
    with Reader([*reads, str(NUM_CONNECTIONS)], requests, num_processes=1) as reader:
        started = NUM_LOAD_STREAMS
        wait_until(lambda: reader.report().started == started, "all requests started")
        wait_until(lambda: reader.report().tokens > 0, "tokens")
        (process,) = [
            one
            for one in psutil.Process().children()
            if "tandem_bench.reader.reader_process" in one.cmdline()
        ]
        psutil.Process().cpu_percent(SETTLE_S)
        before, used = reader.report(), process.cpu_times()
        psutil.Process().cpu_percent(seconds)
        after, used_after = reader.report(), process.cpu_times()
    tokens = after.tokens - before.tokens
    spent_s = used_after.user + used_after.system - used.user - used.system
    return {
        "tokens_per_s": tokens / (after.time_s - before.time_s),
        "us_per_token": spent_s * 1e6 / tokens,
    }


def print_clients(rounds: int) -> None:
    """Print the CPU of each client as a table."""
    print(
        f"\n| client | µs of CPU a token at {NUM_STREAMS} streams | of all rounds |\n|---|---:|---|"
    )
    with services(5.0, NUM_STREAMS) as (_, service), tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[float]] = {one.name: [] for one in PROGRAMS}
        for _round in range(rounds):
            for one in PROGRAMS:
                found[one.name].append(us_per_token(one, service, Path(folder)))
    for name, times in found.items():
        told = ", ".join(f"{one:.1f}" for one in times)
        print(f"| {name} | {statistics.median(times):.1f} | {told} |", flush=True)


def print_load(rounds: int, seconds: float) -> None:
    """Print the rates of both readers, in turn, and their ratio."""
    print(
        f"\n| {NUM_LOAD_STREAMS} streams, one frontend | tokens/s | µs of CPU a token |\n|---|---:|---:|"
    )
    ways = {"load program in Go": load_rate, "reader of `tandem bench stream`": reader_rate}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    with services(1.0, NUM_LOAD_STREAMS) as (executor, service):
        for turn in range(rounds):
            for name in ways if turn % 2 == 0 else reversed(ways):
                found[name].append(ways[name](service, seconds))
                wait_until(lambda: is_idle(executor), "all requests ended")
    for name, rows in found.items():
        rate = statistics.median(one["tokens_per_s"] for one in rows)
        print(
            f"| {name} | {rate:,.0f} | {statistics.median(one['us_per_token'] for one in rows):.2f} |"
        )
    go, reader = ([one["tokens_per_s"] for one in found[name]] for name in ways)
    ratios = [ours / theirs for ours, theirs in zip(go, reader, strict=True)]
    told = ", ".join(f"{one:.2f}" for one in ratios)
    print(f"\nGo ÷ reader: {statistics.median(ratios):.2f} (of rounds: {told})")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of everything; default: 3")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load; default: 3")
    given = parser.parse_args()
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}", flush=True)
    print_clients(given.rounds)
    print_load(given.rounds, given.seconds)


if __name__ == "__main__":
    main()
