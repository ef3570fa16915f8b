"""The report on policies can be written again by one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "policies"


class TestReport:
    @pytest.mark.slow
    def test_script_writes_page_and_pictures(self, tmp_path):
        """
        The script writes the page with one table per workload and the pictures it shows.
        """
        command = [sys.executable, str(FOLDER / "report.py"), "--out", str(tmp_path)]
        shape = ["--only", "preemption", "--requests", "10", "--seeds", "1"]
        subprocess.run([*command, *shape], check=True, capture_output=True)
        page = (tmp_path / "README.md").read_text()

        assert ["## Recompute against swap"] == [
            line for line in page.splitlines() if line.startswith("## ")
        ]
        assert 3 == page.count("| swap |") == page.count("| recompute |")
        for name in ("latency", "memory"):
            assert f"(plots/preemption/{name}.svg)" in page
            assert (tmp_path / "plots" / "preemption" / f"{name}.svg").stat().st_size > 1000

    def test_page_is_there_with_its_pictures(self):
        """
        Every picture that the committed page shows is committed too, and no claim on it fails.
        """
        page = (FOLDER / "README.md").read_text()
        shown = [
            line.partition("](")[2].rstrip(")") for line in page.splitlines() if line[:2] == "!["
        ]
        assert len(shown) == 12
        assert all((FOLDER / path).is_file() for path in shown)
        assert "does not hold" not in page
