"""
Random input for every port, with figures: `python -m tests.faults.fuzz [--cases N] [--seed S]`.

Ends with exit code 1 if a case failed INTERNAL or UNKNOWN or hung, if less than half of a kind were
decoded, or if a service is gone, logged an error or keeps what it took.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.fuzz.calls import run_cases
from tests.faults.fuzz.cases import KINDS
from tests.faults.fuzz.http_bodies import run_bodies
from tests.faults.fuzz.judge import Outcome
from tests.faults.fuzz.openapi import run_page
from tests.faults.fuzz.resources import Memory, watched
from tests.faults.fuzz.services import Services
from tests.faults.fuzz.tcp.run import run_tcp

HTTP = "http"
OPENAPI = "openapi"
TCP = "tcp"
CASES: Mapping[str, int] = {
    "fields": 275_000,
    "bytes": 275_000,
    "resume": 100_000,
    HTTP: 250_000,
    OPENAPI: 5_000,
    TCP: 100_000,
}
"""
Number of cases of each kind unless the command says another: a million in all. Both `http` and
`openapi` draw JSON from the schemas of the page; schemathesis, which checks answers too, draws and
checks tens in a second where the other sends a thousand.
"""
WARM_UP = 500
"""Cases of a kind before memory is measured: what is loaded and cached once is no leak."""
MAX_CASE_CHARS = 4_000


def main(argv: Sequence[str]) -> int:
    """Run the kinds that are asked for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help="cases of each kind; by default a million in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=CASES, help="default: all")
    options = parser.parse_args(argv)
    is_good = True
    _say(
        "| kind | cases | decoded | suspects | bad | seconds | MiB before | peak | after | ends |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        services = Services(Path(folder))
        try:
            for kind in options.kind or CASES:
                asyncio.run(run_kind(services, kind, WARM_UP, options.seed + 1))
                begin_s = time.monotonic()
                with watched(services) as memory:
                    count = options.cases or CASES[kind]
                    outcome = asyncio.run(run_kind(services, kind, count, options.seed))
                    seconds = time.monotonic() - begin_s
                _say(_row(kind, outcome, seconds, memory))
                problems = find_problems(services, outcome) + memory.problems
                sys.stderr.write("".join(f"{kind}: {one}\n" for one in problems))
                is_good = is_good and not problems
        finally:
            services.close()
    return 0 if is_good else 1


async def run_kind(services: Services, kind: str, count: int, seed: int) -> Outcome:
    """Send the cases of one kind."""
    addresses = services.addresses
    if kind == TCP:
        return await run_tcp(addresses, count=count, seed=seed)
    if kind == HTTP:
        return await run_bodies(addresses[HTTP], count=count, seed=seed)
    if kind == OPENAPI:
        return await asyncio.to_thread(run_page, addresses[HTTP], count=count, seed=seed)
    return await run_cases(addresses, KINDS[kind], count=count, seed=seed)


def find_problems(services: Services, outcome: Outcome) -> list[str]:
    """Return a line for each thing that must not be after cases of a kind."""
    problems = [f"{end}: {case!r}"[:MAX_CASE_CHARS] for end, case in outcome.bad]
    if outcome.decoded * 2 < outcome.ends.total():
        problems.append(f"only {outcome.decoded} of {outcome.ends.total()} were decoded")
    if not services.are_alive():
        problems.append("a service is gone")
    return problems + services.find_errors()


def _row(kind: str, outcome: Outcome, seconds: float, memory: Memory) -> str:
    ends = ", ".join(f"{end} {count}" for end, count in outcome.ends.most_common())
    mib = [
        " / ".join(f"{one:.0f}" for one in figures.values())
        for figures in (memory.before, memory.peak, memory.after)
    ]
    cells = [outcome.ends.total(), outcome.decoded, outcome.num_suspects, outcome.num_bad]
    return (
        f"| {kind} | {' | '.join(map(str, cells))} | {seconds:.0f} | {' | '.join(mib)} | {ends} |"
    )


def _say(*lines: str) -> None:
    """Print at once: a run takes long."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
