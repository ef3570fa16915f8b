"""
`python -m tests.bench.observing`: what metrics, logs and traces cost a scheduler under load.

Two scheduler services, each with an executor without a model whose steps take a fixed time, serve
the same streams in turn. One is silent: no port for metrics, and only errors are logged. The other
keeps all that operators may want: JSON lines at `info` with a line on every 40th step, events of
each request, spans of every request for a collector, and a page of metrics that is read every
--scrape-s seconds. With steps as short as by default the scheduler is what limits the rate, so that
all it does besides costs tokens per second; so does what the collector and the reader of metrics,
both in this process, take of the machine. The first round is not counted. It prints the medians,
and the ratio of each pair of turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench.gateway.reading import cpu_s, read
from tests.bench.machine import machine
from tests.e2e.cluster import PATIENCE, Process
from tests.otlp_collector import Collector, running_collector

SILENT = ("--log-level=error", "--metrics-listen=")
OBSERVED = (
    "--log-level=info",
    "--log-format=json",
    "--track-request-events",
    "--metrics-listen=127.0.0.1:0",
)
WAYS = {"silent": SILENT, "observed": OBSERVED}
"""Flags of each scheduler; the second is compared with the first."""


@contextmanager
def scraped(address: str | None, every_s: float) -> Iterator[list[int]]:
    """Read the page of metrics during the block; yields the sizes of the pages read, in bytes."""
    sizes: list[int] = []
    if address is None:
        yield sizes
        return
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                sizes.append(len(answer.read()))
            is_over.wait(every_s)

    reader = threading.Thread(target=run, name="scraper")
    reader.start()
    try:
        yield sizes
    finally:
        is_over.set()
        reader.join()


class Observed:
    """One scheduler with an executor of its own."""

    def __init__(
        self,
        name: str,
        folder: Path,
        stack: ExitStack,
        given: argparse.Namespace,
        collector: Collector,
    ) -> None:
        rows = (f"--rows={given.streams}", "--max-num-blocks=32768", f"--step-ms={given.step_ms}")
        executor = self._start(
            stack, "tandem_bench.fixed_step", folder, name, "--listen=127.0.0.1:0", *rows
        )
        self._scheduler = self._start(
            stack,
            "scheduler_svc",
            folder,
            name,
            f"--executor={executor.addresses()['address']}",
            f"--max-batch-size={given.streams}",
            "--listen=127.0.0.1:0",
            "--admin-listen=127.0.0.1:0",
            *WAYS[name],
            *([] if name == "silent" else [f"--otlp-endpoint={collector.url}"]),
            *PATIENCE,
        )
        addresses = self._scheduler.addresses()
        self._address: str = addresses["address"]
        self._metrics: str | None = addresses.get("metrics_address")
        self._given = given
        self._collector = collector

    def turn(self) -> dict[str, float]:
        """Read all streams once; returns rates, and CPU µs of the scheduler per token."""
        given = self._given
        tokens = given.streams * given.tokens
        before_s, num_before = cpu_s(self._scheduler), len(self._collector.spans())
        with scraped(self._metrics, given.scrape_s) as pages:
            found = read("grpc", self._address, given.streams, given.tokens)
        return {
            "tokens_per_s": tokens / found["took_s"],
            "scheduler_us": (cpu_s(self._scheduler) - before_s) / tokens * 1e6,
            "tokens_per_message": tokens / found["messages"],
            "pages": len(pages),
            "spans": len(self._collector.spans()) - num_before,
            "log_bytes": self._scheduler.log.stat().st_size,
        }

    @staticmethod
    def _start(stack: ExitStack, module: str, folder: Path, name: str, *flags: str) -> Process:
        process = Process(module, list(flags), folder, f"{name}-{module}")
        stack.callback(process.end)
        return process


def compare(given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the turns of both, those of the first round left out."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder, ExitStack() as stack:
        collector = stack.enter_context(running_collector())
        services = {name: Observed(name, Path(folder), stack, given, collector) for name in WAYS}
        for number in range(1 + given.rounds):
            # Each way begins every other round: the turn after a pause is often the faster one.
            for name in list(services)[:: 1 if number % 2 else -1]:
                turns[name].append(services[name].turn())
    return {name: found[1:] for name, found in turns.items()}


def main() -> None:
    """Measure, and print two lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="streams at a time; default: 256")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a stream; default: 1024")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of turns; default: 10")
    parser.add_argument("--step-ms", type=float, default=1.0, help="time of a step; default: 1")
    parser.add_argument(
        "--scrape-s", type=float, default=1.0, help="between two pages of metrics; default: 1"
    )
    given = parser.parse_args()
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]} | vars(given)))
    turns = compare(given)
    silent, observed = (
        [turn["tokens_per_s"] for turn in turns[name]] for name in ("silent", "observed")
    )
    ratios = [round(b / a, 3) for a, b in zip(silent, observed, strict=True)]
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in found), 1) for key in found[0]}
        for name, found in turns.items()
    }
    print(json.dumps(medians | {"ratio": statistics.median(ratios), "ratios": sorted(ratios)}))


if __name__ == "__main__":
    main()
