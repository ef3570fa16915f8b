"""
Mutation testing of the scheduler core: which wrong changes do the core's fast tests notice?

    python -m tests.scheduler_svc.core.mutants.run [--per-file N] [--jobs N] [--files NAME ...]

Draws mutants of every module of the core, tries each one and keeps the verdicts in `results.tsv`
beside this file. A verdict is kept for as long as its function keeps that change, so a run that was
stopped goes on where it was, and after a change of the core only what changed is tried again.
Why a survivor changes nothing that matters stands in `survivors.tsv`, by key.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.scheduler_svc.core.mutants.mutations import Mutant, mutants_of
from tests.scheduler_svc.core.mutants.trial import ROOT, Workshop

HERE = Path(__file__).parent
RESULTS = HERE / "results.tsv"
COLUMNS = ["key", "file", "function", "line", "was", "becomes", "noticed_by"]
CORE = "scheduler_svc/core"
ORACLES = {"integrity.py"}
"""What finds bugs and is not part of what can be wrong: `test_integrity.py` plants what it finds."""


def sample(per_file: int, seed: int) -> list[Mutant]:
    """So many mutants of each module, the same for the same sources and seed."""
    chosen = []
    for path in sorted((ROOT / CORE).glob("*.py")):
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
    """Verdicts so far, by key."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {row["key"]: row for row in csv.DictReader(file, delimiter="\t")}


def row_of(mutant: Mutant, noticed_by: str) -> dict[str, str]:
    """A verdict as a row of the table."""
    return {
        "key": mutant.key,
        "file": Path(mutant.path).name,
        "function": mutant.function,
        "line": str(mutant.line),
        "was": " ".join(mutant.was.split()),
        "becomes": " ".join(mutant.becomes.split()),
        "noticed_by": noticed_by,
    }


class Table:
    """The verdicts on disk, rewritten after each."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self._lock = threading.Lock()
        known = load_results()
        self.rows = {
            m.key: row_of(m, known[m.key]["noticed_by"]) for m in mutants if m.key in known
        }
        self._order = [mutant.key for mutant in mutants]

    def add(self, mutant: Mutant, noticed_by: str) -> None:
        """Keep a verdict."""
        with self._lock:
            self.rows[mutant.key] = row_of(mutant, noticed_by)
            with RESULTS.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows[key] for key in self._order if key in self.rows)


def try_all(table: Table, mutants: list[Mutant], jobs: int) -> None:
    """Try these mutants."""
    with tempfile.TemporaryDirectory() as folder:
        if failed := Workshop(Path(folder)).notices(None):
            raise SystemExit(f"the tests fail without a mutant: {failed}")
    left = iter(mutants)
    lock = threading.Lock()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            workshop = Workshop(Path(folder))
            while True:
                with lock:
                    mutant = next(left, None)
                if mutant is None:
                    return
                if workshop.source(mutant.path) != (ROOT / mutant.path).read_text():
                    raise SystemExit(f"{mutant.path} has changed meanwhile: start again")
                noticed_by = workshop.notices(mutant)
                table.add(mutant, noticed_by)
                print(
                    f"{noticed_by or 'SURVIVED':60} {mutant.path}:{mutant.line} {mutant.function}"
                )

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(work) for _ in range(jobs)]:
            job.result()


def noticed(table: Table, mutant: Mutant) -> bool:
    """True when some test failed."""
    return bool(table.rows.get(mutant.key, {}).get("noticed_by"))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-file", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", nargs="*", help="try only mutants of these modules")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    arguments = parser.parse_args()
    mutants = sample(arguments.per_file, arguments.seed)
    table = Table(mutants)
    left = [
        mutant
        for mutant in mutants
        if (not arguments.files or Path(mutant.path).stem in arguments.files)
        and (mutant.key not in table.rows or (arguments.again and not noticed(table, mutant)))
    ]
    try_all(table, left, arguments.jobs)
    tried = [mutant for mutant in mutants if mutant.key in table.rows]
    survivors = [mutant for mutant in tried if not noticed(table, mutant)]
    print(f"{len(tried) - len(survivors)} of {len(tried)} noticed")
    for mutant in survivors:
        print(mutant.key, f"{mutant.path}:{mutant.line}", mutant.was, "->", mutant.becomes)


if __name__ == "__main__":
    main()
