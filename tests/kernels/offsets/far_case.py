"""Run of cases of far offsets in a process of their own, which a wrong address would end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_far_cases(module: str, *cases: str, **environment: str) -> None:
    """
    Call functions of a module in one process, and assert that it ends well; of what it prints, the
    last name is that of a case that failed.
    """
    names = ", ".join(cases)
    run = f"for name in {cases!r}:\n    print(name, flush=True)\n    globals()[name]()"
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import {names}\n{run}"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert set(cases) <= set(done.stdout.split())
