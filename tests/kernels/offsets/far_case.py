"""Run of one case of far offsets in a process of its own, which a wrong address would end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_far_case(module: str, case: str, **environment: str) -> None:
    """Call the function `case` of a module, and assert that its process ends well."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import {case}; {case}()"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
