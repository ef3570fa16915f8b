"""
Random input for every port, with figures: `python -m tests.faults.fuzz [--cases N] [--seed S]`.

Ends with exit code 1 if a case failed INTERNAL or UNKNOWN, hung, or a service is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.fuzz.calls import Outcome, run_cases
from tests.faults.fuzz.cases import KINDS
from tests.faults.fuzz.http_bodies import run_bodies
from tests.faults.fuzz.openapi import run_page
from tests.faults.fuzz.services import Services

HTTP = "http"
OPENAPI = "openapi"
ALL_KINDS = (*KINDS, HTTP, OPENAPI)


def main(argv: Sequence[str]) -> int:
    """Run the kinds that are asked for, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=250_000, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=ALL_KINDS, help="default: all")
    options = parser.parse_args(argv)
    is_good = True
    sys.stdout.write(
        "| kind | cases | past decoding | bad | seconds | MiB before | MiB after | ends |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        services = Services(Path(folder))
        try:
            for kind in options.kind or ALL_KINDS:
                before, begin_s = services.memory_mib(), time.monotonic()
                outcome = asyncio.run(run_kind(services, kind, options.cases, options.seed))
                seconds = time.monotonic() - begin_s
                row = _row(kind, outcome, seconds, before, services.memory_mib())
                sys.stdout.write(f"{row}\n")
                for end, case in outcome.bad:
                    sys.stderr.write(f"{end}: {case}\n")
                is_good = is_good and not outcome.num_bad and services.are_alive()
        finally:
            services.close()
    return 0 if is_good else 1


async def run_kind(services: Services, kind: str, count: int, seed: int) -> Outcome:
    """Send the cases of one kind."""
    if kind == HTTP:
        return await run_bodies(services.addresses[HTTP], count=count, seed=seed)
    if kind == OPENAPI:
        address = services.addresses[HTTP]
        return await asyncio.to_thread(run_page, address, count=count, seed=seed)
    return await run_cases(services.addresses, KINDS[kind], count=count, seed=seed)


def _row(
    kind: str,
    outcome: Outcome,
    seconds: float,
    before: dict[str, float],
    after: dict[str, float],
) -> str:
    total = sum(outcome.ends.values())
    ends = ", ".join(f"{end} {count}" for end, count in outcome.ends.most_common())
    memory = [" / ".join(f"{one:.0f}" for one in figures.values()) for figures in (before, after)]
    return (
        f"| {kind} | {total} | {outcome.decoded} | {outcome.num_bad} | {seconds:.0f} | "
        f"{memory[0]} | {memory[1]} | {ends} |"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
