"""The choice of how Triton's kernels run in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHOICE = "from tests.triton_mode import choose_triton_mode; choose_triton_mode()"


def run_python(text):
    """Run Python text without a device and without a mode, and return what became of it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
class TestTritonMode:
    def test_kernels_imported_after_the_choice_are_interpreted(self):
        """
        Triton's own functions are interpreted too, which the kernels call.
        """
        found = run_python(f"{CHOICE}; import triton; print(type(triton.language.cdiv).__name__)")
        assert (found.returncode, found.stdout) == (0, "InterpretedFunction\n")

    def test_a_choice_that_comes_too_late_is_refused(self):
        """
        The error says what has to choose earlier; nothing runs half interpreted.
        """
        found = run_python(f"import triton; {CHOICE}")
        assert found.returncode != 0
        assert "UsageError: triton was imported before its mode was chosen" in found.stderr
