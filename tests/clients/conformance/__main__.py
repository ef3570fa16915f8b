"""
Runs all scenarios of clients/conformance with the clients of all languages, and writes the table of
results: `python -m tests.clients.conformance`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.conformance.programs import ROOT
from tests.clients.conformance.table import RESULTS, read_results, table_of, versions

PLAYED = ("scenarios", "scripted", "streams")
"""Test modules that note results; the others check the page that is written here."""


def main() -> int:
    """Run the tests and write the table; returns the exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        files = [f"tests/clients/conformance/test_{name}.py" for name in PLAYED]
        options = ["-q", f"--conformance-results={results}", *sys.argv[1:]]
        command = [sys.executable, "-m", "pytest", *options, *files]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        RESULTS.write_text(table_of(read_results(results), versions()))
    sys.stdout.write(f"wrote {RESULTS.relative_to(ROOT)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
