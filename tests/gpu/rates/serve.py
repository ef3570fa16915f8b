"""
`python -m tests.gpu.rates.serve`: what clients of both services measure, by the number of requests that they have in flight.
Prints a JSON list.

The load is that of `tandem bench serve`, with random prompts of one length and answers of one length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tandem.process.printing_commands import end_by_signals
from tandem_bench.device.json_rows import JsonRows
from tests.gpu.rates.offline import write_model
from tests.gpu.rates.services import Services, bench_serve, services_parser

_LATENCIES = ("ttft_ms", "itl_ms")
_FEWEST_REQUESTS = 8
_ROUNDS = 3
"""Requests for each one in flight, so that most begin beside others that decode."""


def main() -> int:
    """Measure and print; 1 if a load failed."""
    given = _parser().parse_args()
    model = write_model(given.models, tiny=given.tiny)
    num_failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="serve-") as name,
        JsonRows() as rows,
        Services(
            Path(name),
            model,
            given.device,
            rows=max(given.concurrency),
            longest=given.input_len + given.output_len,
            scheduler=[f"--window={given.window}"],
        ) as services,
    ):
        for concurrency in given.concurrency:
            row = _under_load(given, services.address, concurrency)
            num_failed += not row["answered"]
            rows.add(row)
    return 1 if num_failed else 0


def _under_load(given: argparse.Namespace, address: str, concurrency: int) -> dict[str, Any]:
    """
    Return what the clients measured; where no request succeeded, as they say on stderr, a row
    without an answer.
    """
    num_requests = max(_FEWEST_REQUESTS, _ROUNDS * concurrency)
    command = bench_serve(
        address,
        concurrency=concurrency,
        requests=num_requests,
        input_len=given.input_len,
        output_len=given.output_len,
        max_time_s=given.max_time_s,
    )
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    asked = {
        "in flight": concurrency,
        "input_len": given.input_len,
        "output_len": given.output_len,
        "asked": num_requests,
    }
    if done.returncode:
        sys.stderr.write(f"{concurrency} in flight ended with {done.returncode}\n")
        return {**asked, "answered": 0}
    found = json.loads(done.stdout)
    latencies = {
        f"{name} {percentile}": value
        for name in _LATENCIES
        for percentile, value in found[name].items()
    }
    return {
        **asked,
        "answered": found["requests"] - found["errors"],
        "errors": found["errors"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        **latencies,
    }


def _parser() -> argparse.ArgumentParser:
    parser = services_parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--input-len", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--max-time-s", type=float, default=20.0, help="for each number in flight")
    parser.add_argument("--window", type=int, default=1, help="steps in flight")
    return parser


if __name__ == "__main__":
    end_by_signals()  # so that what it started is ended too
    sys.exit(main())
