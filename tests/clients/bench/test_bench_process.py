"""Benchmarks in processes of their own, as `tandem bench` runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HALTING = """
import signal
from tandem.process.printing_commands import EndedBySignal, run_printing

def main():
    try:
        print("[1", end="", flush=True)
        signal.pause()
    finally:
        print("]")

raise SystemExit(run_printing("halting", main))
"""
"""Stands in for the benchmarks: prints half a line, waits for a signal, and prints the rest."""


def test_output_is_there_at_once_and_whole(tmp_path: Path):
    """
    Output of a benchmark is there before its line ends, and Ctrl-C loses none of it.
    """
    (tmp_path / "tandem_bench").mkdir()
    (tmp_path / "tandem_bench" / "__main__.py").write_text(HALTING)
    (tmp_path / "tandem_bench" / "__init__.py").touch()
    paths = [str(tmp_path), *filter(None, sys.path)]
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tandem_client.cli.programs import run_program as r; r('bench', 'tandem_bench', arguments=['halting'])",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert b"[1" == process.stdout.read(2)
        os.killpg(process.pid, signal.SIGINT)
        assert b"]\n" == process.stdout.read()
