"""Rounds of measurements: each engine in turn, each time in a new process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.process.printing_commands import started_process
from tandem_bench.offline.engines import OURS
from tandem_bench.offline.workload import Task


class EngineFailed(Exception):
    """An engine's process ended with an error; the text holds its name and its last line."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one engine at one number of requests, in tokens/s: of a round, or medians."""

    engine: str
    concurrency: int
    output_tokens_per_s: float
    decode_tokens_per_s: float

    def as_json(self) -> dict[str, int | float | str]:
        """Return the row for `--json`."""
        return {
            "engine": self.engine,
            "concurrency": self.concurrency,
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
        }


@dataclass(slots=True)
class Rounds:
    """Measurements so far, by engine and number of requests, one entry per round."""

    output: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    decode: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    first_output: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Tokens of the first request in the latest round; no entry for engines without tokens."""

    def add(self, engine: str, line: str) -> Rates:
        """Add one line of an engine's process; return its rates."""
        said = json.loads(line)
        key = (engine, int(said["concurrency"]))
        rates = Rates(*key, float(said["output_tokens_per_s"]), float(said["decode_tokens_per_s"]))
        self.output.setdefault(key, []).append(rates.output_tokens_per_s)
        self.decode.setdefault(key, []).append(rates.decode_tokens_per_s)
        if said["tokens"]:
            self.first_output[key] = said["tokens"][0]
        return rates

    def rates(self) -> list[Rates]:
        """Return the medians, in the order of the measurements."""
        return [
            Rates(*key, statistics.median(values), statistics.median(self.decode[key]))
            for key, values in self.output.items()
        ]

    def decode_share(self, engine: str, of: str, concurrency: int) -> float | None:
        """
        Return the ratio of one engine's decode tokens per second to another's.

        It is the median of the rounds' ratios, which suffers least when the machine slows down for
        a while; None without measurements of both.
        """
        ours = self.decode.get((engine, concurrency), [])
        others = self.decode.get((of, concurrency), [])
        ratios = [one / other for one, other in zip(ours, others, strict=False)]
        return statistics.median(ratios) if ratios else None

    def num_equal(self, engine: str, concurrency: int) -> tuple[int, int] | None:
        """
        Return how many first tokens of the first request equal ours, and how many were compared.

        None where one of the two engines returned no tokens.
        """
        ours = self.first_output.get((OURS, concurrency))
        theirs = self.first_output.get((engine, concurrency))
        if ours is None or theirs is None:
            return None
        pairs = list(zip(ours, theirs, strict=True))
        equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        return equal, len(pairs)


def run_engine(task: Task) -> Iterator[str]:
    """
    Yield the lines of an engine's process as they come; the process ends with the generator.

    Raises:
        EngineFailed: The process did not serve the whole task.
    """
    command = [sys.executable, "-m", "tandem_bench.offline.engine_process", task.to_json()]
    threads = str(task.num_threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryFile("w+") as said:
        process = started_process(
            lambda: subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
            )
        )
        try:
            assert process.stdout is not None
            yield from process.stdout
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            said.seek(0)
            lines = said.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise EngineFailed(f"{task.engine} failed: {lines[-1]}")


def engines_in_turn(engines: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the number of the round, from 1, and the engine: all engines, round by round."""
    for number in range(1, num_rounds + 1):
        for engine in engines:
            yield number, engine
