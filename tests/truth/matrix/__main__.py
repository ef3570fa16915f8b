"""
The whole matrix, one case at a time, and a table of it: `python -m tests.truth.matrix`.

Each case has up to 16 processes of PyTorch; `--only TEXT` takes the cases with the text in their
names, such as `tp4` or `qwen3-tp2-pp2`. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.truth.matrix.cases import MATRIX, Case
from tests.truth.matrix.rank_processes import RankProcesses
from tests.truth.matrix.workload import Report, check_case, references

TITLES = (
    "case",
    "compared",
    "preempted",
    "blocks out",
    "blocks in",
    "recomputed",
    "cached tokens",
    "steps",
    "s",
)


def main(argv: Sequence[str]) -> int:
    """Check the cases that are asked for, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth.matrix", description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the cases to check")
    only = parser.parse_args(argv).only
    cases, num_failed = [case for case in MATRIX if only in str(case)], 0
    if not cases:
        parser.error(f"no case has {only!r} in its name")
    _print(TITLES)
    _print(["---"] * len(TITLES))
    with tempfile.TemporaryDirectory() as folder:
        reference, processes = references(Path(folder)), RankProcesses(Path(folder))
        for case in cases:
            started = time.monotonic()
            try:
                report = check_case(case, processes, *reference(case.family))
            except Exception:  # noqa: BLE001  # the other cases are checked all the same
                sys.stderr.write(traceback.format_exc())
                num_failed += 1
                _print([str(case), "FAILED"])
            else:
                _print(_cells(case, report, time.monotonic() - started))
        processes.stop()
    sys.stdout.write(f"\n{len(cases) - num_failed} of {len(cases)} cases are equal to one rank.\n")
    return int(num_failed > 0)


def _cells(case: Case, report: Report, seconds: float) -> list[str]:
    return [
        str(case),
        f"{report.compared:g}",
        str(report.preemptions),
        str(report.swapped_out),
        str(report.swapped_in),
        str(report.recomputed),
        str(report.cached_tokens),
        " + ".join(map(str, report.steps)),
        f"{seconds:.1f}",
    ]


def _print(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
