"""
Mutation testing of the scheduler core: the wrong changes that the core's fast tests notice.

    python -m tests.scheduler_svc.core.mutants.run [--per-file N] [--jobs N] [--files NAME ...]

Draws mutants of every module of the core, tries each one and keeps the verdicts in `results.tsv`
beside this file. A verdict is kept for as long as its function keeps that change, so a run that was
stopped goes on where it was, and after a change of the core only what changed is tried again.
`survivors.tsv` has the reason why each survivor changes nothing that matters, by key.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tests.scheduler_svc.core.mutants.mutations import Mutant, mutants_of
from tests.scheduler_svc.core.mutants.trial import ROOT, begin

HERE = Path(__file__).parent
RESULTS = HERE / "results.tsv"
COLUMNS = ["key", "file", "function", "line", "was", "becomes", "noticed_by"]
CORE = "scheduler_svc/core"
ORACLES = {"integrity.py", "invariants.py", "slot_checks.py"}
"""Modules that find bugs and are not mutated: `test_integrity.py` plants what they find."""


def sample(per_file: int, seed: int) -> list[Mutant]:
    """Return so many mutants of each module, the same for the same sources and seed."""
    chosen = []
    for path in sorted((ROOT / CORE).rglob("*.py")):
        if path.name in ORACLES:
            continue
        relative = str(path.relative_to(ROOT))
        found = [
            mutant
            for mutant in mutants_of(relative, path.read_text())
            if not mutant.function.endswith("check_integrity")
        ]
        # Keys decide, not places: a mutant stays in the sample when others come and go.
        found.sort(key=lambda mutant: random.Random(f"{seed}{mutant.key}").random())
        chosen += sorted(found[:per_file], key=lambda mutant: mutant.start)
    return chosen


def load_results() -> dict[str, dict[str, str]]:
    """Return the verdicts so far, by key."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {row["key"]: row for row in csv.DictReader(file, delimiter="\t")}


def row_of(mutant: Mutant, noticed_by: str) -> dict[str, str]:
    """Return a verdict as a row of the table."""
    return {
        "key": mutant.key,
        "file": mutant.path.removeprefix(f"{CORE}/"),
        "function": mutant.function,
        "line": str(mutant.line),
        "was": " ".join(mutant.was.split()),
        "becomes": " ".join(mutant.becomes.split()),
        "noticed_by": noticed_by,
    }


class Table:
    """The verdicts on disk, rewritten after each."""

    def __init__(self, mutants: list[Mutant]) -> None:
        known = load_results()
        self.rows = {
            m.key: row_of(m, known[m.key]["noticed_by"]) for m in mutants if m.key in known
        }
        self._order = [mutant.key for mutant in mutants]

    def add(self, mutant: Mutant, noticed_by: str) -> None:
        """Keep a verdict."""
        self.rows[mutant.key] = row_of(mutant, noticed_by)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows[key] for key in self._order if key in self.rows)


def try_all(table: Table, mutants: list[Mutant], jobs: int, *, is_brief: bool) -> None:
    """Try these mutants; `is_brief` keeps no verdict of those that only a full trial may notice."""
    for mutant, noticed_by in trials(mutants, jobs, is_brief=is_brief):
        if noticed_by or not is_brief:
            table.add(mutant, noticed_by)
        print(f"{noticed_by or 'SURVIVED':60} {mutant.key} {mutant.path}:{mutant.line}")


def trials(mutants: list[Mutant], jobs: int, *, is_brief: bool) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant and what noticed it, in the order in which the trials end."""
    left, running = list(reversed(mutants)), dict[int, tuple[Mutant, int]]()
    while left or running:
        while left and len(running) < jobs:
            mutant = left.pop()
            process, verdict = begin(mutant, is_brief=is_brief)
            running[process] = mutant, verdict
        process, status = os.wait()
        mutant, verdict = running.pop(process)
        with os.fdopen(verdict) as pipe:
            yield mutant, pipe.read() if status == 0 else "out of time"


def check_tests(*, is_brief: bool) -> None:
    """
    Run the tests without a mutant.

    Raises:
        SystemExit: One of them fails.
    """
    process, verdict = begin(None, is_brief=is_brief)
    _, status = os.waitpid(process, 0)
    with os.fdopen(verdict) as pipe:
        failed = pipe.read()
    if status or failed:
        raise SystemExit(f"the tests fail without a mutant: {failed or 'out of time'}")


def repeat(count: int, jobs: int) -> None:
    """
    Try some mutants again that the walks noticed.

    Raises:
        SystemExit: One is not noticed any more, or half of them are not there any more.
    """
    rows = [row for row in load_results().values() if row["noticed_by"].startswith("walks")]
    chosen = {row["key"]: row["file"] for row in rows[:: max(len(rows) // count, 1)][:count]}
    mutants = []
    for name in sorted({*chosen.values()}):
        path = ROOT / CORE / name
        found = mutants_of(f"{CORE}/{name}", path.read_text()) if path.exists() else []
        mutants += [mutant for mutant in found if mutant.key in chosen]
    if 2 * len(mutants) < count:
        raise SystemExit("the core has changed since the mutants were tried: try them again")
    verdicts = dict(trials(mutants, jobs, is_brief=True))
    if passed := [mutant.key for mutant in mutants if not verdicts[mutant]]:
        raise SystemExit(f"mutants {passed} pass unnoticed")


def noticed(table: Table, mutant: Mutant) -> bool:
    """Return True when some test failed."""
    return bool(table.rows.get(mutant.key, {}).get("noticed_by"))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-file", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", nargs="*", help="try only mutants of these modules")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--repeat", type=int, help="only try so many again that were noticed")
    parser.add_argument("--brief", action="store_true", help="try only the likeliest tests")
    arguments = parser.parse_args()
    if arguments.repeat:
        repeat(arguments.repeat, arguments.jobs)
        return
    mutants = sample(arguments.per_file, arguments.seed)
    table = Table(mutants)
    left = [
        mutant
        for mutant in mutants
        if (not arguments.files or Path(mutant.path).stem in arguments.files)
        and (mutant.key not in table.rows or (arguments.again and not noticed(table, mutant)))
    ]
    check_tests(is_brief=arguments.brief)
    try_all(table, left, arguments.jobs, is_brief=arguments.brief)
    tried = mutants if arguments.brief else [m for m in mutants if m.key in table.rows]
    survivors = [mutant for mutant in tried if not noticed(table, mutant)]
    print(f"{len(tried) - len(survivors)} of {len(tried)} noticed")
    for mutant in survivors:
        print(mutant.key, f"{mutant.path}:{mutant.line}", mutant.was, "->", mutant.becomes)


if __name__ == "__main__":
    main()
