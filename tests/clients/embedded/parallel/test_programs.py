"""Whole programs with several runners, or on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_sizes import ROOT
from tests.ports import free_port

README = ROOT / "clients" / "embedded" / "README.md"
LEAVES_WORK = """
from tandem_embedded import GenerationParams
from tests.clients.embedded.parallel.fleet import fleet

engine, runners = fleet()
for number in range(16):
    engine.submit_request([5, number + 4], GenerationParams(max_tokens=64))
engine.step()
print("left")
"""
ENOUGH_S = 120.0


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=ENOUGH_S,
        check=False,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return the README's program for several ranks."""
    (example,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if "tensor_model_parallel_size" in code
    ]
    path = tmp_path / "program.py"
    path.write_text(example)
    return path


class TestPrograms:
    def test_program_ends_with_work_left(self):
        """
        A program that ends without closing its engine ends at once, although runners have work.
        """
        outcome = run("-c", LEAVES_WORK)
        assert (0, "left\n") == (outcome.returncode, outcome.stdout), outcome.stderr

    @pytest.mark.slow
    def test_program_of_the_readme_prints_the_same_on_two_ranks(self, program):
        """
        Torchrun starts the ranks, which print what one process does.
        """
        alone = run(str(program))
        assert 0 == alone.returncode, alone.stderr
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
        shared = run(*launcher, f"--master-port={free_port()}", str(program))
        assert 0 == shared.returncode, shared.stderr
        assert alone.stdout.strip()
        assert alone.stdout == shared.stdout
