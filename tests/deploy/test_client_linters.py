"""`deploy/local/clients lint`: the linters of the clients in other languages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class TestLint:
    @pytest.mark.parametrize("failing", ["clang-format", "clang-tidy", None])
    def test_any_linter_that_fails_fails_the_check(self, failing: str | None, tmp_path: Path):
        """
        A language's check fails with the first of its linters as with the last, and says which
        language it was.
        """
        for name in ("clang-format", "clang-tidy"):
            linter = tmp_path / name
            linter.write_text(f"#!/bin/sh\nexit {int(name == failing)}\n", encoding="utf-8")
            linter.chmod(0o755)
        ran = subprocess.run(
            [ROOT / "deploy/local/clients", "lint", "cpp"],
            env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == (failing is not None)
        assert ("clients: cpp: lint failed" in ran.stderr) is (failing is not None)
