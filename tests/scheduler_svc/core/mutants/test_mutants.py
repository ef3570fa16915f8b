"""Mutants of the core and their verdicts: the tests notice nearly all, and some are tried again."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from tests.scheduler_svc.core.mutants.mutations import mutants_of
from tests.scheduler_svc.core.mutants.run import HERE, ROOT, load_results

SOURCE = """
def take(count, left):
    if count <= left and count:
        left -= count + 1
        return min(count, left)
    raise ValueError(f"{count + 1} are too many")
"""


class TestMutations:
    def test_each_mutant_is_one_small_change(self):
        """
        Comparisons, operators, numbers, conditions, statements and twins are changed one at a time.
        """
        mutants = mutants_of("m.py", SOURCE)
        changes = {(mutant.was, mutant.becomes) for mutant in mutants}
        assert {
            ("count <= left", "count < left"),
            ("count <= left and count", "(count <= left) or (count)"),
            ("count <= left and count", "not (count <= left and count)"),
            ("left -= count + 1", "pass"),
            ("left -= count + 1", "left += count + 1"),
            ("count + 1", "(count) - (1)"),
            ("1", "2"),
            ("min", "max"),
            ('raise ValueError(f"{count + 1} are too many")', "pass"),
        } == changes

    def test_a_key_outlives_a_move_and_not_a_change(self):
        """
        A mutant keeps its key when its line moves, and equal changes have keys of their own.
        """
        before = {mutant.key for mutant in mutants_of("m.py", SOURCE)}
        after = {mutant.key for mutant in mutants_of("m.py", "\n\n" + SOURCE)}
        twice = mutants_of(
            "m.py", SOURCE.replace("left -= count", "left -= count + 1; left -= count")
        )
        assert before == after
        assert len(twice) == len({mutant.key for mutant in twice})


class TestResults:
    def test_at_least_95_of_100_mutants_are_noticed(self):
        """
        Nearly all mutants that were tried are noticed, and each of the others has a reason why not.
        """
        rows = load_results()
        survivors = {key for key, row in rows.items() if not row["noticed_by"]}
        with (HERE / "survivors.tsv").open(newline="") as file:
            reasons = {row["key"]: row["reason"] for row in csv.DictReader(file, delimiter="\t")}
        assert len(rows) >= 200
        assert len(survivors) <= 0.05 * len(rows)
        assert all(reasons.get(key) for key in survivors)

    @pytest.mark.slow
    def test_mutants_noticed_before_are_noticed_again(self):
        """
        The seeded walks still notice mutants that they noticed before.
        """
        command = [sys.executable, "-m", "tests.scheduler_svc.core.mutants.run", "--repeat", "10"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert 0 == run.returncode, run.stderr
