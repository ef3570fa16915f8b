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
NOT_RUN = ("test_planted_bugs.py", "test_properties.py", "mutants")
"""The first two search at random; what is run here gives the same verdict every time."""
TIMEOUT_S = 240.0


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
        tests = self._tree / TESTS
        own = sorted(path.name for path in tests.glob("test_*.py") if path.name not in NOT_RUN)
        # What fails most often runs first.
        own.sort(key=lambda name: name != "test_random_walks.py")
        self._files = [f"{TESTS}/{name}" for name in own]

    def source(self, path: str) -> str:
        """A file of the copy."""
        return (self._tree / path).read_text()

    def notices(self, mutant: Mutant | None) -> str:
        """
        The first test that fails with a mutant in place, "timeout", or "" when none does.

        Raises:
            RuntimeError: The tests did not run.
        """
        if mutant is None:
            return self._run()
        path = self._tree / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            self._forget_bytecode(path)
            return self._run()
        finally:
            path.write_text(source)
            self._forget_bytecode(path)

    def _forget_bytecode(self, path: Path) -> None:
        """Bytecode is compared by the second and size: a mutant would be taken for the original."""
        for compiled in self._bytecode.rglob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _run(self) -> str:
        paths = [self._tree, self._tree / "protos/python"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONPYCACHEPREFIX": str(self._bytecode),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-m", "not slow", "-rfE",
            "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S / 4:.0f}", *self._files,
        ]  # fmt: skip
        try:
            run = subprocess.run(
                command, cwd=self._tree, env=environment, timeout=TIMEOUT_S,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "timeout"
        if run.returncode == 0:
            return ""
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed:
            return failed[0].split(" - ")[0].split("/")[-1]
        if "Timeout" in run.stdout + run.stderr:
            return "timeout"
        if run.returncode in {1, 2, 4}:  # the mutant does not even import
            return "import"
        raise RuntimeError(run.stdout + run.stderr)
