"""Whether the core's fast tests notice a mutant: one process per mutant, in a copy of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.scheduler_svc.core.mutants.mutations import Mutant

ROOT = Path(__file__).parents[4]
COPIED = ("pyproject.toml", "scheduler_svc", "protos/python", "tests/scheduler_svc/core")
TESTS = "tests/scheduler_svc/core"
NOT_RUN = ("test_planted_bugs.py", "test_properties.py", "test_random_walks.py")
SELECTED = "not test_any_ and not very_deep"
"""Leaves out what searches at random, so that a verdict can be repeated, and what takes long."""
TEST_TIMEOUT_S = 45
TIMEOUT_S = 600
WALKS = """
from tests.scheduler_svc.core.random_walk import walk_all
walk_all(range(60), num_events=25)
"""


class Workshop:
    """A copy of the tree that one trial after the other changes and restores."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        self._bytecode = folder / "bytecode"
        for name in COPIED:
            source, target = ROOT / name, self._tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy(source, target)
        tests = (self._tree / TESTS).glob("test_*.py")
        self._tests = sorted(path.name for path in tests if path.name not in NOT_RUN)

    def source(self, path: str) -> str:
        """A file of the copy."""
        return (self._tree / path).read_text()

    def notices(self, mutant: Mutant | None) -> str:
        """
        The first test that fails with a mutant in place, "" when none does.

        Raises:
            RuntimeError: The tests did not run.
        """
        if mutant is None:
            return self._walk() or self._test(self._tests)
        first = {f"test_{Path(mutant.path).name}"} & {*self._tests}
        path = self._tree / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            self._forget_bytecode(path)
            return (
                self._walk()
                or (first and self._test(sorted(first)))
                or self._test(sorted({*self._tests} - first))
            )
        finally:
            path.write_text(source)
            self._forget_bytecode(path)

    def _forget_bytecode(self, path: Path) -> None:
        """Bytecode is compared by the second and size: a mutant would be taken for the original."""
        for compiled in self._bytecode.rglob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _walk(self) -> str:
        """The same histories as `test_random_walks.py`, without what pytest costs."""
        run = self._run(["-c", WALKS])
        if run is None:
            return "timeout walks"
        return "walks" if run.returncode else ""

    def _test(self, names: list[str]) -> str:
        run = self._run(
            [
                "-m", "pytest", "-x", "-q", "--tb=line", "-m", "not slow", "-rfE",
                "-p", "no:cacheprovider", "-k", SELECTED, f"--timeout={TEST_TIMEOUT_S}",
                *(f"{TESTS}/{name}" for name in names),
            ]
        )  # fmt: skip
        if run is None:
            return "timeout tests"
        if run.returncode in {0, 5}:  # 5: none of them is selected
            return ""
        lines = run.stdout.splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        if not failed:
            raise RuntimeError(run.stdout + run.stderr)
        test = failed[0].split(" - ")[0].split("/")[-1]
        return f"timeout {test}" if "Timeout (>" in run.stdout else test

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str] | None:
        """Run Python in the copy; None when it did not end in time."""
        paths = [self._tree, self._tree / "protos/python"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONPYCACHEPREFIX": str(self._bytecode),
            "OMP_NUM_THREADS": "1",
        }
        try:
            return subprocess.run(
                [sys.executable, *arguments], cwd=self._tree, env=environment, check=False,
                timeout=TIMEOUT_S, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
