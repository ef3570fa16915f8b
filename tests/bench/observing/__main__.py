"""
`python -m tests.bench.observing`: what metrics, logs and traces cost a scheduler under load.

Two scheduler services, each with an executor without a model whose steps take a fixed time, serve
the same streams in turn. One is silent: no port for metrics, and only errors are logged. The other
keeps all that operators may want: JSON lines at `info` with a line on every 40th step, events of
each request, spans of every request for a collector, and a page of metrics that is read every
--scrape-s seconds. With steps as short as by default the scheduler is what limits the rate, so that
all it does besides costs tokens per second; so does what the collector and the reader of metrics,
both in this process, take of the machine. The first round is not counted. It prints the medians, the
ratio of each pair of turns, and between which two ratios the true median lies with 95 %.

With --pin all processes of the schedulers stay on the machine's first processor and all others, the
reader of the streams among them, on the rest. Then nothing but the scheduler limits the rate, and
turns differ less from one another.
"""

from __future__ import annotations

import argparse
import json
import math
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
SCHEDULERS = min(os.sched_getaffinity(0))
"""Processor of the schedulers with --pin."""
MIN_ROUNDS = 6
"""Fewest pairs of turns: fewer have no range of 95 %."""


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


def median_range(ratios: list[float]) -> tuple[float, float]:
    """
    Return the ratios between which the median of all such ratios lies with 95 %.

    Args:
        ratios: At least `MIN_ROUNDS` independent ratios.

    Source: order statistics by the binomial distribution, as in the sign test.
    """
    num, chance, rank = len(ratios), 0.0, 0
    while chance + math.comb(num, rank) / 2**num <= 0.025:
        chance += math.comb(num, rank) / 2**num
        rank += 1
    ordered = sorted(ratios)
    return ordered[rank - 1], ordered[num - rank]


def pin(process: Process, processors: set[int]) -> None:
    """Keep a process with its children, and all threads of theirs, on these processors."""
    for member in process.family():
        for thread in member.threads():
            os.sched_setaffinity(thread.id, processors)


class MeasuredScheduler:
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
        if given.pin:
            pin(self._scheduler, {SCHEDULERS})
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
        services = {
            name: MeasuredScheduler(name, Path(folder), stack, given, collector) for name in WAYS
        }
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
    parser.add_argument(
        "--pin", action="store_true", help="keep schedulers on one processor, all else on others"
    )
    given = parser.parse_args()
    if given.rounds < MIN_ROUNDS:
        parser.error(f"--rounds must be at least {MIN_ROUNDS}, but is {given.rounds}")
    if given.pin:
        others = os.sched_getaffinity(0) - {SCHEDULERS}
        if not others:
            parser.error("--pin takes at least 2 processors, and there is 1")
        os.sched_setaffinity(0, others)  # before there are threads or children, which inherit it
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]} | vars(given)))
    turns = compare(given)
    silent, observed = (
        [turn["tokens_per_s"] for turn in turns[name]] for name in ("silent", "observed")
    )
    ratios = [round(b / a, 3) for a, b in zip(silent, observed, strict=True)]
    medians = {
        name: {key: round(statistics.median(turn[key] for turn in found), 2) for key in found[0]}
        for name, found in turns.items()
    }
    summary = {
        "ratio": statistics.median(ratios),
        "ratio_95": median_range(ratios),
        "scheduler_us_ratio": round(
            medians["observed"]["scheduler_us"] / medians["silent"]["scheduler_us"], 3
        ),
        "ratios": sorted(ratios),
    }
    print(json.dumps(medians | summary))


if __name__ == "__main__":
    main()
